"""Fixtures of the suite: a harness, and benches on tiers that are closed after the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

import pytest

from backends.testing.bench import TierBench
from backends.testing.harness import TierHarness
from backends.testing.rows import FINGERPRINT, RowBuffer, make_context

_Test = TypeVar("_Test", bound=Callable[..., object])


def needs(*names: str) -> Callable[[_Test], _Test]:
    """This test applies to tiers with all these capabilities, or harnesses that `can_stall`."""

    def mark(test: _Test) -> _Test:
        test.needs = names  # type: ignore[attr-defined]
        return test

    return mark


class OpenBench(Protocol):
    """Opens the tier on the test's storage; it is closed, and checked once more, at the end."""

    def __call__(
        self,
        *,
        fingerprint: bytes = FINGERPRINT,
        capacity_bytes: int | None = None,
        row_bytes: int | None = None,
    ) -> TierBench: ...


class SuiteBase:
    """What a subclass gives is `harness_type`; the rest may be changed where a tier needs it.

    `row_bytes` is the size of a block, `rows` how many of them the tests may use at once, and
    `patience_s` how long anything may take before it counts as never.
    """

    harness_type: ClassVar[type[TierHarness]]
    row_bytes: ClassVar[int] = 4 * 4096
    rows: ClassVar[int] = 32
    patience_s: ClassVar[float] = 20.0

    def make_harness(self, directory: Path) -> TierHarness:
        return self.harness_type(directory)

    @pytest.fixture(autouse=True)
    def _skip_what_does_not_apply(self, request: pytest.FixtureRequest) -> None:
        for name in getattr(request.function, "needs", ()):
            owner = self.harness_type if name == "can_stall" else self.harness_type.capabilities
            if not getattr(owner, name):
                pytest.skip(f"for tiers with {name}")

    @pytest.fixture
    def harness(self, tmp_path: Path) -> Iterator[TierHarness]:
        harness = self.make_harness(tmp_path)
        yield harness
        harness.close()

    @pytest.fixture
    def open_bench(self, harness: TierHarness) -> Iterator[OpenBench]:
        benches: list[TierBench] = []

        def open_bench(
            *,
            fingerprint: bytes = FINGERPRINT,
            capacity_bytes: int | None = None,
            row_bytes: int | None = None,
        ) -> TierBench:
            rows = RowBuffer(self.rows, row_bytes or self.row_bytes, fingerprint)
            tier = harness.opener(capacity_bytes)(make_context(rows))
            benches.append(TierBench(tier, rows, self.patience_s))
            return benches[-1]

        yield open_bench
        harness.resume()
        for bench in benches:
            bench.close()

    @pytest.fixture
    def bench(self, open_bench: OpenBench) -> TierBench:
        return open_bench()
