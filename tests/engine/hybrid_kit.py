"""A replica without bytes: every block and row holds the name of what a real one would hold.

What a worker does with a step is done here by name, for each KV-cache group by itself, and whoever
goes on from a hit is held to have everything that attention looks back at from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from backends.config import CacheConfig, KvGroup
from backends.policy.registry import PolicyRegistry
from backends.stack.settings import StackSettings
from backends.stack.stack import TierStack
from backends.tier.base import Tier
from orchestrator.engine.device_cache import DeviceCache
from orchestrator.engine.paging import Paging
from orchestrator.engine.scheduler import Scheduler
from orchestrator.engine.step import FILL, LOAD, ChunkWork
from orchestrator.topology import Topology
from orchestrator.workload.request import Request

ONE = Topology(1, 1, 1, 1, 1, 1)


def make_group(
    name: str, window: int | None = None, tokens_per_block: int | None = None, layer: int = 0
) -> KvGroup:
    kind = "full" if window is None else "sliding_window"
    return KvGroup(name, kind, (layer,), 1, 16, 2, window, tokens_per_block)


@dataclass
class NamedReplica:
    """One rank of one replica; `groups` and `cache` as a plan has them."""

    groups: Sequence[KvGroup]
    cache: CacheConfig
    device_blocks: int
    rows: int
    tiers: Sequence[Tier] = ()
    settings: StackSettings = field(default_factory=StackSettings)
    chunks_per_step: int = 2

    def __post_init__(self) -> None:
        self.paging = Paging.of(self.groups, self.cache, ONE)
        columns = self.paging.columns
        self.stack = TierStack(
            self.rows,
            PolicyRegistry().open("lru", self.rows),
            self.tiers,
            self.settings,
            groups=len(columns),
            reach=[column.reach for column in columns],
        )
        self.scheduler = Scheduler(
            DeviceCache(self.device_blocks, [window.blocks for window in self.paging.windows]),
            self.stack,
            self.paging,
            chunks_per_step=self.chunks_per_step,
        )
        self._blocks_of_request: list[int] = []
        device = self.scheduler._device
        give_back = device.give_back

        def ended(block_ids: Sequence[int]) -> None:
            self._blocks_of_request = list(block_ids)
            give_back(block_ids)

        device.give_back = ended  # type: ignore[method-assign]
        # By group and its own block id, and by row: the hash of what is there.
        self.held: dict[tuple[int, int], int] = {}
        self.row: dict[int, tuple[bytes, int, tuple[int, ...]]] = {}

    def serve(self, request: Request, fail_at: int | None = None) -> int:
        """The tokens that were hit. `fail_at`: the load, by number, that cannot be made good."""
        stats = self.scheduler.stats
        before, loads = stats.hit_tokens, 0
        steps = self.scheduler.steps(request)
        chunks = next(steps, None)
        while chunks is not None:
            loading = [chunk for chunk in chunks if chunk.loads]
            agreed = len(loading)
            if fail_at is not None and loads <= fail_at < loads + agreed:
                agreed = fail_at - loads
            loads += agreed
            missed = [chunk.key for chunk in loading[agreed:]]
            for chunk in chunks:
                self._load(chunk, chunk.key in missed)
            for chunk in chunks:
                self._store(chunk)
            try:
                chunks = steps.send(agreed)
            except StopIteration:
                break
        self.scheduler.settle()
        hit = stats.hit_tokens - before
        self._check(request, hit)
        return hit

    def _blocks(self, chunk: ChunkWork, group: int) -> list[tuple[int, int, int]]:
        """Of each own block of the chunk: the engine's block's place, own id, hash."""
        many = next(c.parts for c in self.paging.columns if c.group == group)
        first = sum(pieces for pieces in self.paging.pieces if pieces < many)
        words = chunk.hashes.reshape(-1, self.paging.words_per_block)
        return [
            (at, int(block) * many + piece if block >= 0 else -1, int(words[at, first + piece]))
            for at, block in enumerate(chunk.block_ids)
            for piece in range(many)
        ]

    def _load(self, chunk: ChunkWork, missed: bool) -> None:
        for group in range(len(self.groups)):
            own = self._blocks(chunk, group)
            size = self.cache.blocks_per_chunk
            columns = [n for n, c in enumerate(self.paging.columns) if c.group == group]
            for place, (at, block, word) in enumerate(own):
                action = chunk.actions[at]
                if action == FILL or (action == LOAD and missed):
                    self.held[group, block] = word
                elif action == LOAD and not chunk.store:
                    column = columns[place // size]
                    row = chunk.rows[column]
                    if row >= 0:
                        key, found, words = self.row[row]
                        assert (key, found) == (chunk.key, column)
                        assert words[place % size] == word
                        self.held[group, block] = word

    def _store(self, chunk: ChunkWork) -> None:
        if not chunk.store:
            return
        size = self.cache.blocks_per_chunk
        for column, row in enumerate(chunk.rows):
            if row < 0:
                continue
            place = self.paging.columns[column]
            own = self._blocks(chunk, place.group)[place.part * size : (place.part + 1) * size]
            for _, block, word in own:
                assert self.held[place.group, block] == word, "stored without its content"
            self.row[row] = (chunk.key, column, tuple(word for _, _, word in own))

    def _check(self, request: Request, hit: int) -> None:
        """The request's own blocks hold, in every group, what attention looks at from the hit's end
        on, and all that was computed."""
        blocks = self._blocks_of_request
        words = self.paging.words(
            request.hashes, len(request.hashes) // self.paging.hashes_per_block
        )
        for index, group in enumerate(self.groups):
            many = next(c.parts for c in self.paging.columns if c.group == index)
            first = sum(pieces for pieces in self.paging.pieces if pieces < many)
            tokens = self.paging.block_tokens // many
            start = 0 if group.sliding_window is None else max(0, hit - group.sliding_window + 1)
            for at in range(len(words) * many):
                if (at + 1) * tokens > start:
                    block = blocks[at // many] * many + at % many
                    assert self.held[index, block] == words[at // many, first + at % many]
