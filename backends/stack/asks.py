"""Which tier holds a block: tiers are asked nearest first, and each has a time to find out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from backends.block import BlockKey
from backends.stack.lane import Lane
from backends.stack.settings import StackSettings
from backends.tier.base import Lookup

NOWHERE: Final = -1
WAIT: Final = -2
HERE: Final = -3  # in the region: nobody has to be asked
_KEEP_S: Final = 10.0  # an answer that nobody came back for


class _Ask(NamedTuple):
    """A tier that is finding out. The tiers before it do not have the block."""

    lane: int
    until_s: float


class Asker:
    """Remembers which tier is being waited for, and which one failed to give a block."""

    def __init__(self, lanes: Sequence[Lane], settings: StackSettings) -> None:
        self._lanes = lanes
        self._timeout_s = settings.lookup_timeout_s
        # Longer than all tiers can take: who is passed from one to the next comes to an end.
        once_s = settings.lookup_timeout_s + 2 * settings.load_timeout_s
        self._refuse_s = settings.refuse_s + len(lanes) * once_s
        self._asks: dict[BlockKey, _Ask] = {}
        self._refused: dict[tuple[BlockKey, int], float] = {}

    def ask(self, blocks: Sequence[BlockKey], now_s: float) -> list[int]:
        """Per block the number of the nearest tier that has it, NOWHERE, or WAIT."""
        found = [NOWHERE] * len(blocks)
        left: Sequence[int] = range(len(blocks))
        for lane in self._lanes:
            if not left:
                break
            if lane.breaker.closed(now_s):
                left = self._ask_lane(lane, blocks, found, left, now_s)
        for at in left:
            if found[at] != WAIT:
                self._asks.pop(blocks[at], None)
        return found

    def _ask_lane(
        self,
        lane: Lane,
        blocks: Sequence[BlockKey],
        found: list[int],
        left: Sequence[int],
        now_s: float,
    ) -> list[int]:
        """Ask one tier for what is left; what is left for the next one."""
        asks, further, asked = self._asks, [], []
        for at in left:
            ask = asks.get(blocks[at])
            skip = ask is not None and ask.lane > lane.number
            if skip or self._refuses(lane, blocks[at], now_s):
                further.append(at)
            else:
                asked.append(at)
        answers = lane.tier.lookup([blocks[at] for at in asked])
        for at, answer in zip(asked, answers, strict=True):
            block = blocks[at]
            if answer is Lookup.HIT:
                found[at] = lane.number
                asks.pop(block, None)
                lane.counters.lookups += not block.group
            elif answer is Lookup.MISS:
                further.append(at)
                lane.counters.lookups += not block.group
            elif self._may_wait(lane, block, now_s):
                found[at] = WAIT
            else:
                lane.counters.late += 1
                asks[block] = _Ask(lane.number + 1, now_s + self._timeout_s)
                further.append(at)
        further.sort()
        return further

    def _refuses(self, lane: Lane, block: BlockKey, now_s: float) -> bool:
        return self._refused.get((block, lane.number), 0.0) > now_s if self._refused else False

    def _may_wait(self, lane: Lane, block: BlockKey, now_s: float) -> bool:
        ask = self._asks.get(block)
        if ask is None or ask.lane < lane.number:
            self._asks[block] = ask = _Ask(lane.number, now_s + self._timeout_s)
        return now_s < ask.until_s

    def until_s(self, block: BlockKey) -> float:
        """When the tier that a WAIT is for will have answered, or the next one is asked."""
        return self._asks[block].until_s

    def refuse(self, block: BlockKey, lane: int, now_s: float) -> None:
        """This tier said it has the block and could not give it: not to be asked for a while."""
        self._refused[block, lane] = now_s + self._refuse_s

    def stored(self, blocks: Sequence[BlockKey], lane: int) -> None:
        """This tier has them now: it may be asked again, whoever was asked after it."""
        if self._asks:
            for block in blocks:
                ask = self._asks.get(block)
                if ask is not None and ask.lane > lane:
                    del self._asks[block]
        if self._refused:
            for block in blocks:
                self._refused.pop((block, lane), None)

    def sweep(self, now_s: float) -> None:
        """Forget what nobody came back for."""
        late_s = now_s - _KEEP_S
        self._asks = {block: ask for block, ask in self._asks.items() if ask.until_s > late_s}
        self._refused = {at: until_s for at, until_s in self._refused.items() if until_s > now_s}

    def forget_asked(self) -> None:
        """Others may have changed what was answered."""
        self._asks.clear()

    def clear(self) -> None:
        self._asks.clear()
        self._refused.clear()
