"""The scheduler's half: vLLM's questions, one key at a time, put to the stack as runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from backends.block import BlockKey
from backends.errors import ConfigError
from backends.runs import Chunks
from backends.stack.stack import TierStack
from backends.tier.base import Lookup
from backends.vllm.worker import RowsSpec

DRAIN_S: Final = 3.0
RESULTS: Final = {
    Lookup.HIT: LookupResult.HIT,
    Lookup.MISS: LookupResult.MISS,
    Lookup.PENDING: LookupResult.RETRY,
}
_SOURCES: Final = {"fs": CacheHitSource.DISK}


class _Answers(NamedTuple):
    start: int
    results: Sequence[Lookup]


class _Seen(Chunks):
    """A request's chunks, and which tier each was brought in from for it."""

    def __init__(self, tokens_per_chunk: Sequence[int]) -> None:
        super().__init__(tokens_per_chunk)
        self.sources: dict[BlockKey, str] = {}
        self.used = False


class _Stale(NamedTuple):
    """Transfers that a reset cut off, until the workers have ended them."""

    steps_left: int
    loads: list[BlockKey]
    stores: list[BlockKey]


def block_key(key: OffloadKey) -> BlockKey:
    return BlockKey(get_offload_block_hash(key), get_offload_group_idx(key))


def by_group(keys: Iterable[OffloadKey]) -> dict[int, list[bytes]]:
    """Block hashes by group, in order."""
    found: dict[int, list[bytes]] = {}
    for key in map(block_key, keys):
        found.setdefault(key.group, []).append(key.hash)
    return found


class StackManager(OffloadingManager):  # type: ignore[misc]
    """See the module. Called by the scheduler's one thread; no method waits but `shutdown`."""

    def __init__(
        self,
        stack: TierStack,
        *,
        tokens_per_chunk: Sequence[int],
        windowed: Sequence[bool],
        none_hash: bytes,
        steps_in_flight: int,
        ended: Callable[[dict[str, Any]], None],
    ) -> None:
        """`windowed`: which groups keep a window only and are asked for from its end on.
        `none_hash` is what the first block's hash must have been chained from. A reset's transfers
        are over when `steps_in_flight` more steps were scheduled. `ended` is called last, with what
        the stack has counted."""
        self.stack = stack
        self._tokens = tokens_per_chunk
        self._windowed = windowed
        self._none_hash = none_hash
        self._steps_in_flight = steps_in_flight
        self._ended = ended
        self._checked = False
        self._answers: dict[tuple[str, int], _Answers] = {}
        self._loading: list[BlockKey] = []
        self._storing: set[BlockKey] = set()
        self._stale: list[_Stale] = []

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if not self._checked:
            self._check_hashes()
        return RequestOffloadingContext()

    def _check_hashes(self) -> None:
        """vLLM sets this up after its scheduler, so only a request can tell."""
        found = bytes(kv_cache_utils.NONE_HASH)
        if found != self._none_hash:
            raise ConfigError(
                f"vLLM's block hashes begin with {found.hex()[:16]}, expected "
                f"{self._none_hash.hex()[:16]}: prefix_caching_hash_algo or PYTHONHASHSEED is not "
                "what the kv-transfer-config says; blocks would be stored that nobody finds"
            )
        self._checked = True

    def _seen(self, context: ReqContext) -> _Seen:
        seen: _Seen | None = context.get_state(_Seen)
        if seen is None:
            seen = _Seen(self._tokens)
            context.set_state(seen)
        # Only one key's position can be asked for in public, and a run is what a tier is fast at.
        positions: dict[OffloadKey, int] = context._offload_key_positions
        if len(positions) > seen.told:
            new = islice(positions.items(), seen.told, None)
            seen.tell((block_key(key), end) for key, end in new)
        return seen

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        block, seen = block_key(key), self._seen(req_context)
        at = seen.place(block, req_context.get_offload_key_position(key))
        group = block.group
        if at is None or self._windowed[group]:
            found = self.stack.lookup([block.hash], first=at or 0, groups=(group,))
            return RESULTS[found.answers[0]]
        known = self._answers.get((req_context.req_id, group))
        if known is None or not known.start <= at < known.start + len(known.results):
            found = self.stack.lookup(
                seen.groups[group][at:], first=at, parent=seen.parent(group, at), groups=(group,)
            )
            known = _Answers(at, found.answers)
            self._answers[req_context.req_id, group] = known
        return RESULTS[known.results[at - known.start]]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        name = self._seen(req_context).sources.get(block_key(key))
        if name is None:
            return CacheHitSource.HOST
        return _SOURCES.get(name, CacheHitSource.EXTERNAL_UNSPECIFIED)

    def _use(self, seen: _Seen, group: int, hashes: Sequence[bytes]) -> None:
        """Told to the stack once a request. vLLM 0.32 itself never touches."""
        if not seen.used:
            seen.used = True
            self.stack.touch(hashes, request=seen.groups[group])

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._answers.clear()
        seen, rows, blocks = self._seen(req_context), list[int](), list[BlockKey]()
        for group, hashes in by_group(keys).items():
            self._use(seen, group, hashes)
            loading = self.stack.prepare_load(hashes, groups=(group,))
            rows += loading.rows[0]
            blocks += (BlockKey(h, group) for h in hashes)
            seen.sources |= {BlockKey(h, group): name for h, name in loading.sources.items()}
        self._loading += blocks
        return RowsSpec(rows, blocks)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._answers.clear()
        for key in map(block_key, keys):
            self._loading.remove(key)
        for hashes in by_group(keys).values():
            self.stack.complete_load(hashes)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        self._answers.clear()
        seen, rows, blocks, short = self._seen(req_context), list[int](), list[BlockKey](), 0
        ends = ((block_key(key), req_context.get_offload_key_position(key)) for key in keys)
        for run in seen.runs(ends):
            self._use(seen, run.group, ())
            storing = self.stack.prepare_store(
                run.keys, first=run.first, parent=run.parent, groups=(run.group,)
            )
            rows += storing.rows[0]
            blocks += (BlockKey(h, run.group) for h in storing.keys)
            short += storing.short
        self._storing.update(blocks)
        self.stack.counters.skipped_stores += short
        if short and not rows:
            return None
        stored = [make_offload_key(block.hash, block.group) for block in blocks]
        return PrepareStoreOutput(stored, RowsSpec(rows, blocks), [])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._answers.clear()
        self._storing.difference_update(map(block_key, keys))
        for group, hashes in by_group(keys).items():
            self.stack.complete_store(hashes, () if success else hashes, groups=(group,))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._answers.clear()
        if self._stale:
            self._release()
        self.stack.step()

    def has_pending_work(self) -> bool:
        return self.stack.busy or bool(self._stale)

    def reset_cache(self) -> None:
        """Forget what is in the region. vLLM tells nothing more of the transfers that are under
        way and has the workers end them in the next step; their rows stay out of use till then."""
        self._answers.clear()
        self._stale.append(_Stale(self._steps_in_flight, self._loading, list(self._storing)))
        self._loading, self._storing = [], set()
        self.stack.reset()

    def on_reset_flushed(self) -> None:
        """vLLM 0.33 tells when the workers have ended them; 0.32 does not."""
        self._stale = [stale._replace(steps_left=0) for stale in self._stale]
        self._release()

    def _release(self) -> None:
        for stale in self._stale:
            if stale.steps_left == 0:
                for key in stale.loads:
                    self.stack.complete_load([key.hash])
                for key in stale.stores:
                    self.stack.complete_store([key.hash], [key.hash], groups=(key.group,))
        self._stale = [
            stale._replace(steps_left=stale.steps_left - 1)
            for stale in self._stale
            if stale.steps_left
        ]

    def shutdown(self) -> None:
        drained = self.stack.drain(DRAIN_S)
        counted = {
            "primary": self.stack.region_report(),
            "rows_used": self.stack.index.rows_used,
            "lower_tiers": self.stack.report(),
            "drained": drained,
        }
        self.stack.close()
        self._ended(counted)
