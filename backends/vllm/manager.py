"""The scheduler's half: vLLM's calls, and its types, for `backends.keywise`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

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
from backends.keywise import KeywiseStack, Request, Rows
from backends.tier.base import Lookup
from backends.vllm.sources import REGION, source_of

DRAIN_S: Final = 3.0
RESULTS: Final = {
    Lookup.HIT: LookupResult.HIT,
    Lookup.MISS: LookupResult.MISS,
    Lookup.PENDING: LookupResult.RETRY,
}


@dataclass
class RowsSpec(LoadStoreSpec):  # type: ignore[misc]
    """What the scheduler's half tells the workers' half."""

    rows: list[int]
    keys: list[BlockKey]


def block_key(key: OffloadKey) -> BlockKey:
    return BlockKey(get_offload_block_hash(key), get_offload_group_idx(key))


class StackManager(OffloadingManager):  # type: ignore[misc]
    """Called by the scheduler's one thread; no method waits but `shutdown`."""

    def __init__(
        self,
        stack: KeywiseStack,
        *,
        none_hash: bytes,
        tell: Callable[[dict[str, Any]], None],
        closed: Callable[[], None],
    ) -> None:
        """`none_hash` is what the first block's hash must have been chained from. `tell` is given
        what the stack has counted when it ends, and `closed` is called last."""
        self.keywise = stack
        self._none_hash = none_hash
        self._tell = tell
        self._closed = closed
        self._checked = False

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

    def _request(self, context: ReqContext) -> Request:
        request: Request | None = context.get_state(Request)
        if request is None:
            request = self.keywise.new_request()
            context.set_state(request)
        # Only one key's position can be asked for in public, and a run is what a tier is fast at.
        positions: dict[OffloadKey, int] = context._offload_key_positions
        if len(positions) > request.told:
            new = islice(positions.items(), request.told, None)
            request.tell((block_key(key), end) for key, end in new)
        return request

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        end = req_context.get_offload_key_position(key)
        return RESULTS[self.keywise.lookup(self._request(req_context), block_key(key), end)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        tier = self._request(req_context).sources.get(block_key(key))
        return CacheHitSource(REGION if tier is None else source_of(tier))

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        rows = self.keywise.prepare_load(self._request(req_context), map(block_key, keys))
        return RowsSpec(*rows)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.keywise.complete_load(map(block_key, keys))

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        ends = ((block_key(key), req_context.get_offload_key_position(key)) for key in keys)
        rows = self.keywise.prepare_store(self._request(req_context), ends)
        if rows is None:
            return None
        return PrepareStoreOutput(offload_keys(rows), RowsSpec(*rows), [])

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self.keywise.complete_store(map(block_key, keys), success=success)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.keywise.step()

    def has_pending_work(self) -> bool:
        return self.keywise.busy

    def reset_cache(self) -> None:
        """vLLM tells nothing more of the transfers that are under way, and has the workers end them
        in the next step."""
        self.keywise.reset()

    def on_reset_flushed(self) -> None:
        """vLLM 0.33 tells when the workers have ended them; 0.32 does not."""
        self.keywise.flushed()

    def shutdown(self) -> None:
        self.keywise.close(DRAIN_S, self._tell)
        self._closed()


def offload_keys(rows: Rows) -> list[OffloadKey]:
    return [make_offload_key(key.hash, key.group) for key in rows.keys]
