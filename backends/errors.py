"""The few error types of the library.

A message says what was found, what was expected, and what to do about it.
"""

from __future__ import annotations


class KvquayError(Exception):
    """Base of every error that kvquay raises on purpose."""


class ConfigError(KvquayError):
    """A frozen configuration object was given values that cannot be right."""


class RegionError(KvquayError):
    """A shared-memory region cannot be created, attached, or trusted."""


class CopyError(KvquayError):
    """A copy was asked for blocks, rows or tensors that do not fit each other."""


class TierError(KvquayError):
    """A tier cannot be opened, or was asked for something that it can never do."""
