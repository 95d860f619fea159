"""The conformance suite's tests, by theme. `backends.testing.TierConformance` is all of them."""
