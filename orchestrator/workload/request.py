"""A request as the engine sees it, and what every source of requests offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and the length of its answer.

    index: place in the stream over all replicas, from 0.
    arrival_s: seconds after the stream's first request.
    prompt_tokens: at least 1. output_tokens: at least 0.
    hashes: `hashes[i]` (32 bytes) stands for all tokens of the sequence from its first up to and
    including unit i, a unit being `tokens_per_hash` tokens. There is one for every full unit
    whose content is known, so there may be fewer than the sequence has units: a trace knows no
    output and no partly filled id.
    """

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hashes: tuple[bytes, ...]


class Workload(Protocol):
    """A stream of requests that can be read again from the start, each time the same."""

    @property
    def skipped(self) -> int:
        """Bad lines passed over so far by the latest iteration."""

    @property
    def skip_reasons(self) -> tuple[str, ...]:
        """The first few of them, each with its line number."""

    def __iter__(self) -> Iterator[Request]:
        """Every request, in order of arrival."""

    def select(self, wanted: Callable[[Request], bool]) -> Iterator[Request]:
        """The requests that `wanted` accepts.

        `wanted` is called once for every request of the stream, in order, with `hashes` left
        empty; only accepted requests are hashed.
        """
