"""The stored block's header: layout, seal, and every way in which a block can be wrong."""

from __future__ import annotations

import struct
from importlib.util import find_spec

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.block import (
    COMPLETE,
    EMPTY,
    HASH_BYTES_MAX,
    HEADER_BYTES,
    MAGIC,
    SLOTS_MAX,
    WRITING,
    BlockKey,
    HeaderRows,
    check,
    check_row,
    holds,
    is_whole,
    read_header,
    seal,
    set_state,
    slot_lengths,
    write_header,
)
from backends.config import BLOCK_FORMAT_VERSION
from backends.errors import ConfigError
from backends.tier.base import Bytes

PAYLOAD_BYTES = 8192
KEY = BlockKey(b"k" * 32, 3)
FINGERPRINT = bytes(range(32))


def make_block(
    key: BlockKey = KEY, fingerprint: bytes = FINGERPRINT, state: int = COMPLETE
) -> Bytes:
    block = np.full(HEADER_BYTES + PAYLOAD_BYTES, 0xEE, dtype=np.uint8)
    write_header(
        block,
        key,
        fingerprint=fingerprint,
        slot_lengths=[4000, 4096],
        created_ns=1_700_000_000_123_456_789,
        state=state,
    )
    block[HEADER_BYTES:] = np.random.default_rng(5).integers(0, 256, PAYLOAD_BYTES, np.uint8)
    return block


def sealed_block() -> Bytes:
    block = make_block()
    seal(block, PAYLOAD_BYTES)
    return block


def why(block: Bytes) -> str | None:
    return check(block, KEY, FINGERPRINT, PAYLOAD_BYTES)


def test_the_header_is_laid_out_as_its_description_says() -> None:
    block = sealed_block()
    raw = block[:HEADER_BYTES].tobytes()
    assert raw[:8] == MAGIC
    assert struct.unpack_from("<IIII", raw, 8) == (BLOCK_FORMAT_VERSION, COMPLETE, 3, 32)
    assert raw[24:88] == b"k" * 32 + bytes(32)
    assert struct.unpack_from("<QQ", raw, 88) == (8096, 1_700_000_000_123_456_789)
    assert raw[104:136] == FINGERPRINT
    payload_checksum = xxhash.xxh3_64_intdigest(block[HEADER_BYTES:].tobytes())
    assert struct.unpack_from("<IIQII", raw, 136) == (2, 1, payload_checksum, 4000, 4096)
    assert raw[160:4088] == bytes(4088 - 160)
    assert struct.unpack_from("<Q", raw, 4088) == (xxhash.xxh3_64_intdigest(raw[:4088]),)


def test_a_header_reads_back() -> None:
    header = read_header(make_block())
    assert header.key == KEY
    assert (header.payload_bytes, header.slots, header.state) == (8096, 2, COMPLETE)
    assert slot_lengths(make_block()) == (4000, 4096)


def test_a_sealed_block_is_right() -> None:
    assert why(sealed_block()) is None


def test_only_the_seal_changes_when_a_block_is_sealed() -> None:
    before, block = make_block(), make_block()
    seal(block, PAYLOAD_BYTES)
    changed = set(np.flatnonzero(before != block).tolist())
    assert changed <= set(range(140, 152)) | set(range(4088, 4096))


def test_sealing_twice_writes_nothing_new() -> None:
    block = sealed_block()
    first = block.copy()
    seal(block, PAYLOAD_BYTES)
    assert (block == first).all()


def test_a_seal_that_holds_is_not_made_anew_over_damaged_bytes() -> None:
    block = sealed_block()
    block[HEADER_BYTES + 7] ^= 1
    seal(block, PAYLOAD_BYTES)
    assert why(block) == "has a damaged payload: its checksum differs"


@pytest.mark.parametrize("state", [WRITING, EMPTY])
def test_leaving_complete_breaks_the_seal(state: int) -> None:
    block = sealed_block()
    set_state(block, state)
    block[HEADER_BYTES] ^= 1
    set_state(block, COMPLETE)
    assert why(block) == "has a damaged header: its checksum differs"
    seal(block, PAYLOAD_BYTES)
    assert why(block) is None


@settings(max_examples=300, deadline=None)
@given(st.integers(0, HEADER_BYTES + PAYLOAD_BYTES - 1), st.integers(0, 7))
def test_any_flipped_bit_is_found(at: int, bit: int) -> None:
    block = sealed_block()
    block[at] ^= 1 << bit
    assert why(block) is not None


def test_every_flipped_bit_of_the_fields_is_found() -> None:
    block = sealed_block()
    for at in [*range(164), *range(4080, 4100)]:
        for bit in range(8):
            block[at] ^= 1 << bit
            assert why(block) is not None, (at, bit)
            block[at] ^= 1 << bit
    assert why(block) is None


@settings(max_examples=100, deadline=None)
@given(st.integers(0, HEADER_BYTES + PAYLOAD_BYTES - 1))
def test_any_truncation_is_found(size: int) -> None:
    assert why(sealed_block()[:size]) is not None


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (sealed_block()[:100], "is 100 bytes long, expected at least a header of 4096"),
        (sealed_block()[:5000], "is 5000 bytes long, expected 12288: truncated"),
        (np.zeros(12288, np.uint8), "it is not a block"),
        (make_block(), "has a damaged header: its checksum differs"),
        (make_block(state=WRITING), f"has state {WRITING}, expected {COMPLETE}"),
        (make_block(BlockKey(b"k" * 31, 3)), "holds key 6b6b6b6b6b6b6b6b of group 3, expected"),
        (make_block(BlockKey(b"k" * 32, 4)), "of group 4, expected 6b6b6b6b6b6b6b6b of group 3"),
        (make_block(fingerprint=bytes(32)), "has fingerprint 0000000000000000, expected 00010203"),
    ],
)
def test_what_is_wrong_is_said(block: Bytes, reason: str) -> None:
    assert reason in (why(block) or "")


def test_another_format_version_is_said() -> None:
    block = sealed_block()
    block[8] += 1
    found = BLOCK_FORMAT_VERSION + 1
    assert why(block) == f"has format version {found}, expected {BLOCK_FORMAT_VERSION}"


def test_a_sealed_header_over_an_unsealed_flag_is_refused() -> None:
    block = make_block()
    checksum = xxhash.xxh3_64_intdigest(block[:4088].tobytes())
    block[4088:4096] = np.frombuffer(struct.pack("<Q", checksum), np.uint8)
    assert why(block) == "was never sealed: it has no checksum of its payload"


def test_a_hash_that_ends_in_zeros_is_not_its_own_beginning() -> None:
    block = make_block(BlockKey(b"a\0", 0))
    assert holds(block, BlockKey(b"a\0", 0))
    assert not holds(block, BlockKey(b"a", 0))
    assert not holds(block, BlockKey(b"a\0\0", 0))


@pytest.mark.parametrize(
    ("state", "held", "whole"),
    [
        *((EMPTY, False, False), (WRITING, True, False)),
        *((COMPLETE, True, True), (7, False, False)),
    ],
)
def test_a_row_holds_a_key_while_it_is_written_and_is_whole_after(
    state: int, held: bool, whole: bool
) -> None:
    block = make_block(state=state)
    assert (holds(block, KEY), is_whole(block, KEY)) == (held, whole)
    assert not is_whole(block, KEY._replace(group=KEY.group + 1))


def test_a_row_may_be_stored_only_when_it_is_the_keys_complete_block() -> None:
    assert check_row(make_block(), KEY, FINGERPRINT) is None
    assert check_row(make_block(state=WRITING), KEY, FINGERPRINT)
    assert check_row(make_block(), KEY._replace(group=0), FINGERPRINT)
    assert check_row(make_block(), KEY, bytes(32))
    assert check_row(np.full(HEADER_BYTES, 0xA5, np.uint8), KEY, FINGERPRINT)


def test_an_old_header_leaves_no_trace_under_a_new_one() -> None:
    block = np.zeros(HEADER_BYTES, np.uint8)
    arguments = {"fingerprint": FINGERPRINT, "created_ns": 1, "state": COMPLETE}
    write_header(block, KEY, slot_lengths=[1] * SLOTS_MAX, **arguments)
    assert slot_lengths(block) == (1,) * SLOTS_MAX
    write_header(block, KEY, slot_lengths=[1], **arguments)
    fresh = np.zeros(HEADER_BYTES, np.uint8)
    write_header(fresh, KEY, slot_lengths=[1], **arguments)
    assert (block == fresh).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": BlockKey(b"x" * (HASH_BYTES_MAX + 1), 0)}, "block hash has 65 bytes"),
        ({"key": BlockKey(b"x", -1)}, "group -1"),
        ({"fingerprint": b"short"}, "has 5, expected 32"),
        ({"slot_lengths": [1] * (SLOTS_MAX + 1)}, f"expected at most {SLOTS_MAX}"),
        ({"slot_lengths": [1 << 32]}, "do not fit a block's header"),
    ],
)
def test_what_does_not_fit_a_header_is_an_error(changes: dict[str, object], reason: str) -> None:
    arguments: dict[str, object] = {
        "key": KEY,
        "fingerprint": FINGERPRINT,
        "slot_lengths": [1],
        "created_ns": 1,
        "state": COMPLETE,
    }
    arguments.update(changes)
    with pytest.raises(ConfigError, match=reason):
        write_header(np.zeros(HEADER_BYTES, np.uint8), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("compiled", [True, False])
@given(
    st.lists(st.binary(max_size=HASH_BYTES_MAX), max_size=9),
    st.integers(0, 1),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
)
@settings(max_examples=60)
def test_headers_that_are_filled_together_are_those_that_are_filled_one_by_one(
    compiled: bool, hashes: list[bytes], group: int, slots: list[int]
) -> None:
    lengths = [[4096] * 3, [7] * len(slots)]
    rows = np.full((16, HEADER_BYTES + 64), 0xEE, np.uint8)
    expected = rows.copy()
    headers = HeaderRows(rows, fingerprint=FINGERPRINT, slot_lengths=lengths, compiled=compiled)
    order = np.random.default_rng(len(hashes)).permutation(16)[: len(hashes)].tolist()
    headers.clear(order)
    # Twice, the longer first: the second finds what the first and its seal have left.
    for turn in (0, group):
        headers.announce(hashes, order, turn, 1_700_000_000_123_456_789)
        for row, name in zip(order, hashes, strict=True):
            write_header(
                expected[row],
                BlockKey(name, turn),
                fingerprint=FINGERPRINT,
                slot_lengths=lengths[turn],
                created_ns=1_700_000_000_123_456_789,
                state=WRITING,
            )
        assert (rows == expected).all()
        headers.complete(order[1:])
        for row in order[1:]:
            set_state(expected[row], COMPLETE)
            seal(rows[row], 64)
            seal(expected[row], 64)
        assert (rows == expected).all()


def test_a_machine_with_a_compiler_fills_headers_with_compiled_code() -> None:
    assert find_spec("backends._headers"), "python setup.py build_ext --inplace builds it"


@pytest.mark.parametrize("compiled", [True, False])
def test_headers_that_are_filled_together_refuse_what_does_not_fit(compiled: bool) -> None:
    rows = np.zeros((2, HEADER_BYTES), np.uint8)
    with pytest.raises(ConfigError, match="has 5, expected 32"):
        HeaderRows(rows, fingerprint=b"short", slot_lengths=[[1]], compiled=compiled)
    headers = HeaderRows(
        rows, fingerprint=FINGERPRINT, slot_lengths=[[1] * SLOTS_MAX], compiled=compiled
    )
    with pytest.raises(ConfigError, match="block hash has 65 bytes"):
        headers.announce([b"a", b"x" * 65], [0, 1], 0, 1)
    for no_row in (2, 1 << 70):
        with pytest.raises((IndexError, OverflowError)):
            headers.announce([b"a", b"b"], [0, no_row], 0, 1)
        with pytest.raises((IndexError, OverflowError)):
            headers.complete([0, no_row])
    with pytest.raises(ValueError, match="2"):
        headers.announce([b"a", b"b"], [0], 0, 1)
    assert not rows.any()
    headers.announce([b"a"], [1], 0, 1)
    assert slot_lengths(rows[1]) == (1,) * SLOTS_MAX
