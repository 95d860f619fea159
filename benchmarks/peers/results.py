"""What was measured: figures of each way, and what comes of comparing them with ours."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

SPEED: Final = "MB/s"
# Figures that a part may have, in the order in which they are shown.
STORE, ON_DISK, LOAD = "store", "store, on the disk", "load"


@dataclass(slots=True)
class Figures:
    """One way at one size of block: bytes a second, and processor seconds a GB, in each round."""

    bytes_per_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_s_per_gb: dict[str, list[float]] = field(default_factory=dict)

    def add(self, what: str, nbytes: int, seconds: float, cpu_s: float | None = None) -> None:
        self.bytes_per_s.setdefault(what, []).append(nbytes / seconds)
        if cpu_s is not None:
            self.cpu_s_per_gb.setdefault(what, []).append(cpu_s / nbytes * 1e9)


@dataclass(frozen=True, slots=True)
class Traits:
    """What a way did with damaged bytes and after a restart, as it was tried here, and what its
    source says of publishing and bounds."""

    checksum: str = "not tried"
    restart: str = "not tried"
    publish: str = ""
    bounds: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ratio` is how many times better ours is, above 1, or worse. `ours` and `theirs` are medians
    in `unit`; the ratio is the median of the rounds' own."""

    part: str
    peer: str
    what: str
    block: str
    unit: str
    ours: float
    theirs: float
    ratio: float

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.part, self.what, self.block, f"kvquay/{self.peer}")))


@dataclass(frozen=True, slots=True)
class Failure:
    """A peer that has no figures, and why."""

    part: str
    peer: str
    block: str
    reason: str


@dataclass(slots=True)
class PartResult:
    """All of one part. `figures` and `failures` are by (way, block); block "" means all sizes."""

    part: str
    ours: str
    ways: Sequence[str]
    figures: dict[tuple[str, str], Figures] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    traits: dict[str, Traits] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # Comparisons that were not made from figures, such as those of another benchmark's.
    given: list[Comparison] = field(default_factory=list)

    def measured(self) -> list[tuple[str, str]]:
        """(way, block) of those that have figures and did not fail, sizes first, then ways."""
        blocks = list(dict.fromkeys(block for _, block in self.figures))
        good = [each for each in self.figures if each not in self.failures]
        places = {way: place for place, way in enumerate(self.ways)}
        return sorted(good, key=lambda each: (blocks.index(each[1]), places[each[0]]))

    def comparisons(self) -> Iterator[Comparison]:
        yield from self.given
        for way, block in self.measured():
            theirs = self.figures[way, block]
            ours = self.figures.get((self.ours, block))
            if way == self.ours or ours is None or (self.ours, block) in self.failures:
                continue
            for what, values in theirs.bytes_per_s.items():
                own = ours.bytes_per_s.get(what, [])
                if ratios := [o / t for o, t in zip(own, values, strict=False)]:
                    yield Comparison(
                        *(self.part, way, what, block, SPEED),
                        ours=statistics.median(own) / 1e6,
                        theirs=statistics.median(values) / 1e6,
                        ratio=statistics.median(ratios),
                    )

    def failed(self) -> Iterator[Failure]:
        for (way, block), reason in self.failures.items():
            yield Failure(self.part, way, block, reason)


def median_of(values: Mapping[str, list[float]], what: str) -> float | None:
    return statistics.median(values[what]) if values.get(what) else None
