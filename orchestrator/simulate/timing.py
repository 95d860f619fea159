"""How long transfers take, as `doctor.json` says.

Loads take what the doctor found for batches of so many blocks; between two numbers that it measured
latency goes straight, and behind the last as between the last two. Stores, and loads where there is
no such curve, take the latency of a lone block, and (n - 1) * b / bandwidth more for n blocks of b
bytes, where the bandwidth is that of as many blocks at a time as the tier has under way.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from orchestrator.doctor.result import (
    Curve,
    Latency,
    ObjectFigures,
    PathFigures,
    Result,
    TierFigures,
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One direction of one tier: `first_s` for a lone block, `block_s` for each further one.
    `measured`: seconds of batches by their number of blocks, ascending, which come before these."""

    first_s: float = 0.0
    block_s: float = 0.0
    measured: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, curve: Curve, scale: float = 1.0) -> Transfer:
        """`scale`: how much larger blocks are than those that were measured; what a batch takes
        for its blocks grows with it, and what it takes at all does not."""
        points = [
            (point.blocks, max(0.0, point.mean - curve.fixed_s) * scale + curve.fixed_s)
            for point in curve.points
        ]
        if points[0][0] != 1:
            points.insert(0, (1, curve.fixed_s + curve.per_block_s * scale))
        more_s = curve.per_block_s * scale
        if len(points) > 1:
            (before, before_s), (last, last_s) = points[-2:]
            more_s = max(0.0, last_s - before_s) / (last - before)
        return cls(points[0][1], more_s, tuple(points))

    def seconds(self, blocks: float) -> float:
        """From submit to the end of a batch, where nothing else is under way. Less than one block
        counts as one."""
        if not blocks:
            return 0.0
        points = self.measured or ((1, self.first_s),)
        if blocks <= 1:
            return self.first_s
        at = bisect_left(points, blocks, key=lambda point: point[0])
        if at == len(points):
            last, last_s = points[-1]
            return last_s + (blocks - last) * self.block_s
        (low, low_s), (high, high_s) = points[at - 1], points[at]
        return low_s + (blocks - low) / (high - low) * (high_s - low_s)


@dataclass(frozen=True, slots=True)
class TierTiming:
    """One tier."""

    store: Transfer = Transfer()
    load: Transfer = Transfer()


@dataclass(frozen=True, slots=True)
class Timing:
    """`copy` is one worker's, of a chunk out of the region, `chunk_bytes` of it. `tiers` by name;
    one that is not in it takes no time."""

    tiers: dict[str, TierTiming]
    copy: Transfer = Transfer()
    chunk_bytes: int = 1

    def tier(self, name: str) -> TierTiming:
        return self.tiers.get(name, TierTiming())

    @property
    def timed(self) -> frozenset[str]:
        """Tiers whose loads were measured, the region's copies as `shm`."""
        lower = {name for name, tier in self.tiers.items() if tier.load.first_s > 0}
        return frozenset(lower | ({"shm"} if self.copy.first_s > 0 else set()))

    def copied_s(self, load_bytes: int) -> float:
        """A worker's copy of so many bytes out of the region, in one step."""
        return self.copy.seconds(load_bytes / self.chunk_bytes)


NO_TIME = Timing({})


def read_timing(result: Result, row_bytes: int) -> Timing:
    """`row_bytes` is what a block of this configuration is, where the doctor measured others."""
    tiers = {tier_name(tier): _tier(tier, row_bytes) for tier in result.tiers}
    memory = result.memory
    if memory is None:
        return Timing(tiers)
    if memory.load_curve is not None and memory.step_chunk_bytes:
        return Timing(tiers, Transfer.of(memory.load_curve), memory.step_chunk_bytes)
    rate = memory.load_bytes_per_s or memory.copy_bytes_per_s
    chunk_s = memory.chunk_bytes / rate if rate else 0.0
    first_s = chunk_s if memory.load_latency_s is None else memory.load_latency_s.mean
    return Timing(tiers, Transfer(first_s, chunk_s), memory.chunk_bytes)


def tier_name(tier: TierFigures) -> str:
    return "object" if isinstance(tier, ObjectFigures) else "fs"


def _tier(tier: TierFigures, row_bytes: int) -> TierTiming:
    if isinstance(tier, ObjectFigures):
        parts: tuple[PathFigures | ObjectFigures, ...] = (tier,)
    else:
        parts = tier.paths
    scale = row_bytes / tier.block_bytes
    store, curve = _transfer("store", parts, row_bytes, scale), tier.load_curve
    if curve is not None:
        return TierTiming(store, Transfer.of(curve, scale))
    return TierTiming(store, _transfer("load", parts, row_bytes, scale))


def _transfer(
    what: str, parts: tuple[PathFigures | ObjectFigures, ...], row_bytes: int, scale: float
) -> Transfer:
    """Blocks spread over the paths of a tier: their bandwidths add up, their latencies do not."""
    rates = [rate for part in parts if (rate := getattr(part, f"{what}_bytes_per_s"))]
    block_s = row_bytes / sum(rates) if rates else 0.0
    lone = [
        latency.mean
        for part in parts
        if part.alone and (latency := _latency(part.alone, what)) is not None
    ]
    if lone:
        return Transfer(sum(lone) / len(lone) * _grown(scale), block_s)
    # Without a measurement of one at a time: the typical one among others, less their share.
    among = [latency.p50 for part in parts if (latency := _latency(part, what)) is not None]
    return Transfer(sum(among) / len(among) if among else block_s, block_s)


def _latency(part: object, what: str) -> Latency | None:
    found: Latency | None = getattr(part, f"{what}_latency_s")
    return found


def _grown(scale: float) -> float:
    """A larger block takes longer, a smaller one is not known to take less."""
    return max(1.0, scale)
