"""An independent, simple model of the caches of one replica.

The engine is tested against it: for the same requests in the same order both must count the same
hits, stores and evictions. It knows no tensors, no processes and no clock, and it is written to
be read, not to be fast. It shares no code with the engine but the eviction policy, which is tested
for itself.

Units
    A block is `tokens_per_block` tokens of the sequence, a chunk `blocks_per_chunk` blocks. The
    hash of block i is `hashes[(i + 1) * tokens_per_block / tokens_per_hash - 1]`; the key of a
    chunk is the hash of its last block. Blocks and chunks without such a hash are not known:
    they are computed and thrown away.

Places
    The device cache holds `device_blocks` blocks. Each is free or taken; a free block may still
    hold the content of a hash and be found by it. The region has `region_rows` rows; a chunk
    takes one row for each of `groups` groups, so `region_rows // groups` chunks fit.

A request of P prompt and O output tokens needs N = ceil((P + O) / tokens_per_block) blocks.

 1. If N is more than the whole device cache it is rejected: `rejected` counts it, and nothing
    else happens or is counted.
 2. At most floor((P - 1) / tokens_per_block) blocks can be hits: one token is always computed.
 3. Device: the leading blocks that the device cache holds are hits, and are taken.
 4. Region: from the chunk that the first other block lies in, consecutive chunks that the region
    holds, each wholly within the limit of 2. Their blocks beyond the device hits are region
    hits. The request's chunks up to the end of these are told to the policy as used.
 5. The other blocks are allocated from the free list, from its head. What they held is gone.
 6. All N blocks are then filled. Each known block can from now on be found by its hash, unless
    another block already is, which then stays the one.
 7. Store: each known chunk that the region does not hold gets a row, in order. For those that
    find none free, the policy is asked how many of them are worth it, and then for victims, none
    of them a chunk of this request, all at once; the last ones for which none is left are
    skipped. The policy is then told of each unbroken run of new chunks, with the chunk before it.
 8. The N blocks are freed, the last one first: found-by-hash ones to the tail of the free list,
    the others to its head.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields

from backends.policy.registry import PolicyRegistry


@dataclass(frozen=True)
class HitRecord:
    """What one request counted. A rejected one counts `rejected` and nothing else."""

    requests: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    hit_tokens_device: int = 0
    hit_tokens_region: int = 0
    stored_chunks: int = 0
    evicted_chunks: int = 0
    skipped_stores: int = 0

    def __add__(self, other: HitRecord) -> HitRecord:
        names = [field.name for field in fields(self)]
        return HitRecord(**{n: getattr(self, n) + getattr(other, n) for n in names})


class ReplicaCacheModel:
    """The caches of one replica, empty at first. Semantics: the module's docstring."""

    def __init__(
        self,
        device_blocks: int,
        region_rows: int,
        tokens_per_block: int,
        blocks_per_chunk: int,
        tokens_per_hash: int,
        groups: int = 1,
        eviction: str = "lru",
    ) -> None:
        assert tokens_per_block % tokens_per_hash == 0
        self.device_blocks = device_blocks
        self.region_chunks = region_rows // groups
        self.tokens_per_block = tokens_per_block
        self.blocks_per_chunk = blocks_per_chunk
        self.hashes_per_block = tokens_per_block // tokens_per_hash

        # Free blocks, the next to be reused first.
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(device_blocks))
        self.hash_of_block: dict[int, bytes] = {}
        self.block_of_hash: dict[bytes, int] = {}
        self.region: set[bytes] = set()
        self.policy = PolicyRegistry().open(eviction, max(1, self.region_chunks))
        self.now_s = 0.0
        self._totals = HitRecord()

    def totals(self) -> HitRecord:
        """The sum over all requests so far."""
        return self._totals

    def process(
        self,
        prompt_tokens: int,
        output_tokens: int,
        hashes: tuple[bytes, ...],
        now_s: float = 0.0,
    ) -> HitRecord:
        """One request, from lookup to free, at the workload's own time. Returns what it counted."""
        assert prompt_tokens >= 1
        self.now_s = now_s
        record = self._process(prompt_tokens, output_tokens, hashes)
        self._totals = self._totals + record
        return record

    def _process(
        self, prompt_tokens: int, output_tokens: int, hashes: tuple[bytes, ...]
    ) -> HitRecord:
        size = self.tokens_per_block
        needed = -(-(prompt_tokens + output_tokens) // size)
        if needed > self.device_blocks:
            return HitRecord(rejected=1)

        block_hashes = list(hashes[self.hashes_per_block - 1 :: self.hashes_per_block])
        chunk_keys = block_hashes[self.blocks_per_chunk - 1 :: self.blocks_per_chunk]
        max_hit = (prompt_tokens - 1) // size

        blocks = self._take_device_hits(block_hashes[:max_hit])
        device_hits = len(blocks)
        region_hits = self._look_up_region(chunk_keys, device_hits, max_hit)
        while len(blocks) < needed:
            blocks.append(self._allocate())
        self._register(blocks, block_hashes)
        stored, evicted, skipped = self._store(chunk_keys)
        self._free(blocks)

        return HitRecord(
            requests=1,
            prompt_tokens=prompt_tokens,
            hit_tokens_device=device_hits * size,
            hit_tokens_region=region_hits * size,
            stored_chunks=stored,
            evicted_chunks=evicted,
            skipped_stores=skipped,
        )

    def _take_device_hits(self, candidates: list[bytes]) -> list[int]:
        blocks = []
        for block_hash in candidates:
            if block_hash not in self.block_of_hash:
                break
            block = self.block_of_hash[block_hash]
            del self.free[block]
            blocks.append(block)
        return blocks

    def _look_up_region(self, chunk_keys: list[bytes], device_hits: int, max_hit: int) -> int:
        start = device_hits // self.blocks_per_chunk
        end = start
        while (
            end < len(chunk_keys)
            and (end + 1) * self.blocks_per_chunk <= max_hit
            and chunk_keys[end] in self.region
        ):
            end += 1
        self.policy.touch(chunk_keys[:end], self.now_s)
        return max(0, end * self.blocks_per_chunk - device_hits)

    def _allocate(self) -> int:
        block, _ = self.free.popitem(last=False)
        if block in self.hash_of_block:
            del self.block_of_hash[self.hash_of_block.pop(block)]
        return block

    def _register(self, blocks: list[int], block_hashes: list[bytes]) -> None:
        for block, block_hash in zip(blocks, block_hashes, strict=False):
            if block_hash not in self.block_of_hash:
                self.block_of_hash[block_hash] = block
                self.hash_of_block[block] = block_hash

    def _store(self, chunk_keys: list[bytes]) -> tuple[int, int, int]:
        missing = all_missing = [key for key in chunk_keys if key not in self.region]
        room = self.region_chunks - len(self.region)
        if len(missing) > room:
            at = chunk_keys.index(missing[0])
            before = chunk_keys[at - 1] if at else None
            missing = missing[: self.policy.admit(missing, room, self.now_s, at, before)]
        short = max(0, len(self.region) + len(missing) - self.region_chunks)
        victims = self.policy.victims(short, set(chunk_keys)) if short else []
        self.region.difference_update(victims)
        new = missing[: self.region_chunks - len(self.region)]
        self.region.update(new)
        run: list[bytes] = []
        for at, key in enumerate([*chunk_keys, None]):
            if key in new:
                run.append(key)
            elif run:
                start = at - len(run)
                before = chunk_keys[start - 1] if start else None
                self.policy.insert(run, self.now_s, start, before)
                run = []
        return len(new), len(victims), len(all_missing) - len(new)

    def _free(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.free[block] = None
            if block not in self.hash_of_block:
                self.free.move_to_end(block, last=False)
