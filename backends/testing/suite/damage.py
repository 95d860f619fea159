"""What is stored goes bad under the tier: it is found, told, put aside, and mended by a store."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import numpy as np
import pytest

from backends.block import (
    COMPLETE,
    HEADER_BYTES,
    WRITING,
    BlockKey,
    seal,
    set_state,
    write_header,
)
from backends.config import BLOCK_FORMAT_VERSION
from backends.testing.bench import TierBench
from backends.testing.harness import TierHarness
from backends.testing.rows import FINGERPRINT, make_keys, stored_block
from backends.testing.suite.base import OpenBench, SuiteBase, needs
from backends.tier.base import Bytes, Lookup, Outcome

DONE = Outcome.DONE
NOT_SERVED = {Outcome.MISSING, Outcome.CORRUPT}
_VERSION_OFFSET = 8
_FIELDS_BYTES = 160  # of a header, the rest of which is zero but for its last 8 bytes

Damage = Callable[[bytes, BlockKey], bytes]


def _cut(keep: Callable[[int], int]) -> Damage:
    return lambda data, key: data[: keep(len(data))]


def _flip(offset: int, bits: int) -> Damage:
    return lambda data, key: data[:offset] + bytes([data[offset] ^ bits]) + data[offset + 1 :]


def _of_version(version: int) -> Damage:
    def make(data: bytes, key: BlockKey) -> bytes:
        block = _array(data)
        block[_VERSION_OFFSET : _VERSION_OFFSET + 4] = np.frombuffer(
            version.to_bytes(4, "little"), np.uint8
        )
        return _sealed(block)

    return make


def _with_header(state: int, *, sealed: bool) -> Damage:
    def make(data: bytes, key: BlockKey) -> bytes:
        block = _array(data)
        lengths = [block.size - HEADER_BYTES]
        write_header(
            block, key, fingerprint=FINGERPRINT, slot_lengths=lengths, created_ns=1, state=COMPLETE
        )
        set_state(block, state)
        return _sealed(block) if sealed else block.tobytes()

    return make


def _other_key(data: bytes, key: BlockKey) -> bytes:
    return stored_block(make_keys("another", 1)[0], FINGERPRINT, len(data)).tobytes()


def _other_group(data: bytes, key: BlockKey) -> bytes:
    return stored_block(key._replace(group=key.group + 1), FINGERPRINT, len(data)).tobytes()


def _other_fingerprint(data: bytes, key: BlockKey) -> bytes:
    other = hashlib.sha256(b"another namespace").digest()
    return stored_block(key, other, len(data)).tobytes()


def _noise(data: bytes, key: BlockKey) -> bytes:
    return random.Random(1).randbytes(len(data))


def _lost_payload(data: bytes, key: BlockKey) -> bytes:
    return data[:HEADER_BYTES] + bytes(len(data) - HEADER_BYTES)


def _lost_header(data: bytes, key: BlockKey) -> bytes:
    return bytes(HEADER_BYTES) + data[HEADER_BYTES:]


DAMAGES: dict[str, Damage] = {
    "empty": _cut(lambda size: 0),
    "one_byte": _cut(lambda size: 1),
    "half_a_header": _cut(lambda size: HEADER_BYTES // 2),
    "a_header_alone": _cut(lambda size: HEADER_BYTES),
    "half_a_payload": _cut(lambda size: (HEADER_BYTES + size) // 2),
    "one_byte_short": _cut(lambda size: size - 1),
    "lost_header": _lost_header,
    "lost_payload": _lost_payload,
    "foreign_file": _noise,
    "foreign_text": lambda data, key: b"not a block\n",
    "another_key": _other_key,
    "another_group": _other_group,
    "another_fingerprint": _other_fingerprint,
    "older_version": _of_version(BLOCK_FORMAT_VERSION - 1),
    "newer_version": _of_version(BLOCK_FORMAT_VERSION + 1),
    "never_sealed": _with_header(COMPLETE, sealed=False),
    "never_completed": _with_header(WRITING, sealed=True),
}


class DamageTests(SuiteBase):
    @needs("corruption")
    @pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
    def test_a_wrong_block_is_found_and_mended(
        self, damage: Damage, bench: TierBench, harness: TierHarness
    ) -> None:
        keys = make_keys("damaged", 5)
        bench.store(keys)
        bad = self._damage(harness, keys[2], damage)
        outcomes = bench.load(keys)
        assert outcomes[2] in NOT_SERVED
        assert outcomes[:2] + outcomes[3:] == [DONE] * 4
        assert bench.tier.counters()["corrupt"] == outcomes.count(Outcome.CORRUPT)
        assert bench.lookup(keys).count(Lookup.MISS) == 1
        assert harness.raw_read(FINGERPRINT, keys[2]) != bad, "the wrong block was left there"
        assert bench.store(keys) == [DONE] * 5
        assert bench.load(keys) == [DONE] * 5

    @needs("corruption")
    def test_a_flipped_bit_anywhere_is_found(self, bench: TierBench, harness: TierHarness) -> None:
        chance = random.Random(7)
        rest = range(_FIELDS_BYTES, self.row_bytes)
        offsets = [*range(_FIELDS_BYTES), *chance.sample(rest, 64), HEADER_BYTES - 8]
        offsets += [HEADER_BYTES - 1, HEADER_BYTES, self.row_bytes - 1]
        keys = make_keys("flipped", len(offsets))
        size = self.rows // 2
        for begin in range(0, len(keys), size):
            some = keys[begin : begin + size]
            bench.store(some)
            for key, offset in zip(some, offsets[begin:], strict=False):
                self._damage(harness, key, _flip(offset, 1 << chance.randrange(8)))
            served = [
                offset
                for offset, outcome in zip(offsets[begin:], bench.load(some), strict=False)
                if outcome not in NOT_SERVED
            ]
            assert not served, f"served with a bit flipped at byte {served}"

    @needs("corruption")
    @pytest.mark.parametrize("name", ["another_key", "half_a_payload", "foreign_text"])
    def test_a_wrong_block_nobody_has_read_does_not_stay(
        self, name: str, bench: TierBench, harness: TierHarness
    ) -> None:
        [key] = make_keys("unread", 1)
        bench.store([key])
        self._damage(harness, key, DAMAGES[name])
        # The first store may believe what stands there; whoever reads it finds out.
        bench.store([key])
        if bench.load([key]) != [DONE]:
            assert bench.store([key]) == [DONE]
        assert bench.load([key]) == [DONE]

    @needs("corruption", "persistent")
    @pytest.mark.parametrize("name", ["half_a_payload", "another_fingerprint", "older_version"])
    def test_a_block_that_went_wrong_meanwhile_is_found(
        self, name: str, open_bench: OpenBench, harness: TierHarness
    ) -> None:
        keys = make_keys("meanwhile", 3)
        first = open_bench()
        first.store(keys)
        first.close()
        self._damage(harness, keys[1], DAMAGES[name])
        again = open_bench()
        outcomes = again.load(keys)
        assert outcomes[1] in NOT_SERVED
        assert (outcomes[0], outcomes[2]) == (DONE, DONE)
        again.store(keys)
        assert again.load(keys) == [DONE] * 3

    def _damage(self, harness: TierHarness, key: BlockKey, damage: Damage) -> bytes:
        data = harness.raw_read(FINGERPRINT, key)
        assert data is not None, "raw_read finds nothing where a block was stored"
        bad = damage(data, key)
        assert bad != data
        harness.raw_write(FINGERPRINT, key, bad)
        return bad


def _array(data: bytes) -> Bytes:
    return np.frombuffer(bytearray(data), dtype=np.uint8)


def _sealed(block: Bytes) -> bytes:
    seal(block, block.size - HEADER_BYTES)
    return block.tobytes()
