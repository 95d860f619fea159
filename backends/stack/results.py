"""What the stack's verbs answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backends.tier.base import Lookup


class Found(NamedTuple):
    """One answer a key: HIT, it is in the region; PENDING, ask again; MISS.

    By `deadline_s`, on the clock of `time.monotonic`, every PENDING of these will be over, or be
    another tier's: a tier that is late is passed over, each tier once.

    `whole`, where some groups keep a window only: how many leading keys the others have. If that is
    more than what is hit, the run parts there from what was stored.
    """

    answers: Sequence[Lookup]
    deadline_s: float | None
    whole: int = 0

    @property
    def hits(self) -> int:
        """How many leading keys are HIT."""
        answers = self.answers
        if answers.count(Lookup.HIT) == len(answers):
            return len(answers)
        return next(n for n, answer in enumerate(answers) if answer is not Lookup.HIT)

    @property
    def waits(self) -> bool:
        """Whether the leading HITs may become more if one asks again."""
        hits = self.hits
        return hits < len(self.answers) and self.answers[hits] is Lookup.PENDING


class Loading(NamedTuple):
    """`rows[i][n]` is where `keys[n]`'s block of the i-th group stands. `sources` has, for keys
    that were brought in from a tier and are used for the first time, that tier's name."""

    rows: list[list[int]]
    sources: dict[bytes, str]


class Storing(NamedTuple):
    """Entries that are to be stored, all or the leading ones of those that were not there.
    `rows[i][n]` is the row of `keys[n]` in the i-th group, or -1 where that is there already."""

    keys: Sequence[bytes]
    rows: list[list[int]]
    evicted: list[bytes]
    short: int
