"""Tiers below the region: each one asynchronous, batched, and answering per key."""
