"""The trace reader: right hashes, and no input that it does not answer for."""

from __future__ import annotations

import json
import os
import tracemalloc
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.workload.errors import WorkloadError
from orchestrator.workload.mooncake import MooncakeReader, count_lines
from orchestrator.workload.request import Request
from orchestrator.workload.trace_line import (
    MAX_LINE_BYTES,
    SHORTEST_LINE_BYTES,
    BadLineError,
    parse_line,
)


def line(
    timestamp: float = 0, length: int = 1024, output: int = 7, ids: list[int] | None = None
) -> str:
    ids = list(range(-(-length // 512))) if ids is None else ids
    return json.dumps(
        {"timestamp": timestamp, "input_length": length, "output_length": output, "hash_ids": ids}
    )


def write(folder: Path, *lines: str | bytes) -> str:
    path = folder / "trace.jsonl"
    path.write_bytes(b"".join(s.encode() + b"\n" if isinstance(s, str) else s for s in lines))
    return str(path)


def read(path: str, tokens_per_hash: int = 512, **options: Any) -> list[Request]:
    return list(MooncakeReader(path, tokens_per_hash=tokens_per_hash, **options))


def test_fields_become_a_request(tmp_path: Path) -> None:
    path = write(tmp_path, line(5000, 1000, 30, [4, 9]), line(6500.5, 512, 0, [4]))
    first, second = read(path)
    assert (first.index, first.arrival_s, first.prompt_tokens, first.output_tokens) == (
        0,
        0.0,
        1000,
        30,
    )
    assert (second.index, second.arrival_s, second.output_tokens) == (1, 1.5005, 0)


def test_hashes_of_a_trace_stay_what_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, line(ids=[3, 5]), line(length=1536, ids=[3, 6, 7]))
    digest = blake2b(digest_size=16)
    for tokens_per_hash in (16, 512):
        for request in read(path, tokens_per_hash, salt="tenant"):
            digest.update(b"".join(request.hashes))
    assert digest.hexdigest() == "75530bb4b2ea7ac66ea0e7599d6973fb"


@pytest.mark.parametrize("tokens_per_hash", [1, 16, 128, 512])
def test_only_full_ids_give_hashes(tmp_path: Path, tokens_per_hash: int) -> None:
    path = write(tmp_path, *(line(length=n) for n in (511, 512, 513, 1023, 1024)))
    per_id = 512 // tokens_per_hash
    counts = [len(request.hashes) for request in read(path, tokens_per_hash)]
    assert counts == [0, per_id, per_id, per_id, 2 * per_id]


@pytest.mark.parametrize("tokens_per_hash", [16, 512])
def test_hashes_are_shared_exactly_as_far_as_the_ids_are(
    tmp_path: Path, tokens_per_hash: int
) -> None:
    path = write(tmp_path, line(length=2048, ids=[0, 1, 2, 3]), line(length=2048, ids=[0, 1, 9, 3]))
    one, other = (request.hashes for request in read(path, tokens_per_hash))
    shared = 2 * 512 // tokens_per_hash
    assert one[:shared] == other[:shared]
    # Also the last id: it is the same, but what stands before it is not.
    assert not set(one[shared:]) & set(other)
    assert len(set(one)) == len(one)


def test_salt_separates_tenants(tmp_path: Path) -> None:
    path = write(tmp_path, line())
    one, other = (read(path, 16, salt=salt)[0].hashes for salt in ("a", "b"))
    assert not set(one) & set(other)


@given(
    prompts=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=20)
)
@settings(max_examples=50, deadline=None)
def test_the_expansion_cache_never_changes_a_hash(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> None:
    lines = [line(length=512 * len(ids), ids=ids) for ids in prompts]
    path = write(tmp_path_factory.mktemp("trace"), *lines)
    assert read(path, 64, cached_hashes=1 << 18) == read(path, 64, cached_hashes=1)


def test_the_expansion_cache_is_bounded(tmp_path: Path) -> None:
    path = write(tmp_path, *(line(length=512, ids=[n]) for n in range(400)))
    reader = MooncakeReader(path, tokens_per_hash=1, cached_hashes=4 * 512)
    tracemalloc.start()
    made = sum(len(request.hashes) for request in reader)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made == 400 * 512
    assert peak_bytes < 1 << 20  # all 204,800 hashes would take 16 MB


def test_offset_and_limit_choose_good_lines_and_time_starts_at_the_first(tmp_path: Path) -> None:
    path = write(tmp_path, "{", *(line(1000 * n, 512 + n) for n in range(6)), "[]")
    found = read(path, offset=2, requests=3, on_bad_line="skip")
    assert [(r.index, r.arrival_s, r.prompt_tokens) for r in found] == [
        (0, 0.0, 514),
        (1, 1.0, 515),
        (2, 2.0, 516),
    ]


def test_select_asks_about_every_request_and_hashes_only_the_wanted(tmp_path: Path) -> None:
    path = write(tmp_path, *(line(length=512 * n) for n in (1, 2, 3, 4)))
    asked: list[Request] = []

    def wanted(request: Request) -> bool:
        asked.append(request)
        return request.index % 2 == 1

    found = list(MooncakeReader(path, tokens_per_hash=64).select(wanted))
    assert [r.index for r in asked] == [0, 1, 2, 3]
    assert all(r.hashes == () for r in asked)
    assert found == [r for r in read(path, 64) if r.index % 2 == 1]


GOOD = {"timestamp": 1, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}


def changed(**fields: Any) -> str:
    return json.dumps({**GOOD, **fields})


def without(name: str) -> str:
    return json.dumps({key: value for key, value in GOOD.items() if key != name})


BAD_LINES = {
    "empty": ("", "empty line"),
    "blank": ("   ", "empty line"),
    "not json": ("{timestamp: 1}", "bad JSON"),
    "cut off": (changed()[:-3], "bad JSON"),
    "two objects": (changed() + changed(), "bad JSON"),
    "a list": ("[1, 2]", "expected a JSON object"),
    "null": ("null", "expected a JSON object"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "byte order mark": ("\ufeff" + changed(), "BOM"),
    "field twice": ('{"timestamp": 1, ' + changed()[1:], "'timestamp' (str) twice"),
    "no timestamp": (without("timestamp"), "'timestamp' is missing"),
    "no input_length": (without("input_length"), "'input_length' is missing"),
    "no output_length": (without("output_length"), "'output_length' is missing"),
    "no hash_ids": (without("hash_ids"), "'hash_ids' is missing"),
    "no field": ("{}", "found: no field"),
    "timestamp text": (changed(timestamp="1"), "timestamp is '1' (str)"),
    "timestamp true": (changed(timestamp=True), "timestamp is True (bool)"),
    "timestamp null": (changed(timestamp=None), "timestamp is None"),
    "timestamp negative": (changed(timestamp=-1), "timestamp is -1"),
    "timestamp NaN": (changed(timestamp=float("nan")), "found NaN"),
    "timestamp Infinity": (changed(timestamp=float("inf")), "found Infinity"),
    "timestamp overflows": (changed().replace(": 1,", ": 1e999,"), "timestamp is inf"),
    "timestamp huge": (changed(timestamp=10**400), "timestamp is 1000"),
    "number too long": (changed().replace(": 1,", ": " + "9" * 5000 + ","), "bad JSON"),
    "length a float": (changed(input_length=600.0), "input_length is 600.0 (float)"),
    "length true": (changed(input_length=True, hash_ids=[1]), "input_length is True (bool)"),
    "length zero": (changed(input_length=0, hash_ids=[]), "input_length is 0"),
    "length negative": (changed(input_length=-5), "input_length is -5"),
    "length huge": (changed(input_length=2**31), "input_length is 2147483648"),
    "output negative": (changed(output_length=-1), "output_length is -1"),
    "output text": (changed(output_length="many"), "output_length is 'many'"),
    "ids an object": (changed(hash_ids={"1": 2}), "hash_ids is {'1': 2} (dict)"),
    "ids too few": (changed(hash_ids=[1]), "hash_ids has 1 ids, expected 2 = ceil"),
    "ids too many": (changed(hash_ids=[1, 2, 3]), "hash_ids has 3 ids, expected 2 = ceil"),
    "id true": (changed(hash_ids=[1, True]), "hash_ids holds True (bool)"),
    "id a float": (changed(hash_ids=[1, 2.0]), "hash_ids holds 2.0 (float)"),
    "id negative": (changed(hash_ids=[-1, 2]), "hash_ids holds -1"),
    "id huge": (changed(hash_ids=[1, 2**63]), "hash_ids holds 9223372036854775808"),
}


@pytest.mark.parametrize(("bad", "said"), BAD_LINES.values(), ids=BAD_LINES.keys())
def test_bad_line_is_an_error_with_file_and_line_number(
    tmp_path: Path, bad: str, said: str
) -> None:
    path = write(tmp_path, line(), line(), bad, line())
    with pytest.raises(WorkloadError) as caught:
        read(path)
    assert f"{path}:3: " in str(caught.value)
    assert said in str(caught.value)
    assert "on_bad_line=skip" in str(caught.value)
    assert len(str(caught.value)) < 500 + len(path)


@pytest.mark.parametrize("bad", [text for text, _ in BAD_LINES.values()], ids=BAD_LINES.keys())
def test_bad_line_can_be_skipped_and_is_counted(tmp_path: Path, bad: str) -> None:
    path = write(tmp_path, line(length=512), bad, line(length=1024))
    reader = MooncakeReader(path, tokens_per_hash=512, on_bad_line="skip")
    assert [r.prompt_tokens for r in reader] == [512, 1024]
    assert reader.skipped == 1
    assert reader.skip_reasons[0].startswith("line 2: ")


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, line(), b'{"timestamp": "\xff"}\n')
    with pytest.raises(WorkloadError, match=r":2: found byte 0xff at 15, expected UTF-8"):
        read(path)


def test_gzip_is_recognised(tmp_path: Path) -> None:
    path = write(tmp_path, b"\x1f\x8b\x08\x00\x00\x00\n")
    with pytest.raises(WorkloadError, match="unpack it first"):
        read(path)


def test_time_that_goes_backwards_is_a_bad_line(tmp_path: Path) -> None:
    path = write(tmp_path, line(10), line(20), line(19), line(20))
    with pytest.raises(WorkloadError, match=r":3: timestamp is 19, expected at least 20"):
        read(path)
    assert [r.arrival_s for r in read(path, on_bad_line="skip")] == [0.0, 0.01, 0.01]


def test_extra_fields_and_line_ends_of_other_systems_are_accepted(tmp_path: Path) -> None:
    extra = json.dumps({**GOOD, "chat": {"id": [1, None]}, "note": "é"})
    path = write(tmp_path, extra.encode() + b"\r\n", extra.encode())
    assert len(read(path)) == 2


def test_a_line_without_end_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with path.open("wb") as file:
        file.write(line().encode() + b"\n")
        file.truncate(64 << 20)  # a hole: one line of zero bytes
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line(length=512).encode())
    tracemalloc.start()
    reader = MooncakeReader(str(path), tokens_per_hash=512, on_bad_line="skip")
    assert [r.prompt_tokens for r in reader] == [1024, 512]
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reader.skipped == 1
    assert f"more than {MAX_LINE_BYTES} bytes" in reader.skip_reasons[0]
    assert peak_bytes < 24 << 20


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, *[line()] * 3, "bad")
    assert len(read(path, requests=3)) == 3
    with pytest.raises(WorkloadError):
        read(path, requests=4)


def test_only_the_first_reasons_are_kept_and_a_new_iteration_counts_anew(tmp_path: Path) -> None:
    path = write(tmp_path, *["bad"] * 50, line())
    reader = MooncakeReader(path, tokens_per_hash=512, on_bad_line="skip")
    for _ in range(2):
        assert len(list(reader)) == 1
        assert reader.skipped == 50
        assert len(reader.skip_reasons) == 5


def test_a_file_without_requests_is_an_error(tmp_path: Path) -> None:
    empty = write(tmp_path)
    with pytest.raises(WorkloadError, match="is empty"):
        read(empty)
    bad = write(tmp_path, "one", "two")
    with pytest.raises(WorkloadError, match="found 0 requests and 2 bad lines, the first: line 1"):
        read(bad, on_bad_line="skip")


def test_an_offset_behind_the_end_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, line(), line())
    assert len(read(path, offset=1)) == 1
    with pytest.raises(WorkloadError, match="found 2 requests; offset is 2, it must be less than"):
        read(path, offset=2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "is a directory"),
        (lambda path: os.mkfifo(path), "not a regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.touch(), "is empty"),
    ],
    ids=["absent", "directory", "fifo", "symlink loop", "empty"],
)
def test_what_is_not_a_file_with_content_is_refused(tmp_path: Path, make: Any, said: str) -> None:
    path = tmp_path / "trace"
    make(path)
    with pytest.raises(WorkloadError, match=said) as caught:
        read(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, line())
    os.chmod(path, 0)
    with pytest.raises(WorkloadError, match="may not be read"):
        read(path)


@pytest.mark.parametrize("tokens_per_hash", [0, -16, 3, 48, 513, 1024])
def test_unit_of_hashing_must_divide_an_id(tmp_path: Path, tokens_per_hash: int) -> None:
    with pytest.raises(WorkloadError, match=f"is {tokens_per_hash}, but a trace knows .* 512"):
        read(write(tmp_path, line()), tokens_per_hash)


@pytest.mark.parametrize("options", [{"offset": -1}, {"requests": 0}, {"on_bad_line": "ignore"}])
def test_options_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError):
        read(write(tmp_path, line()), **options)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(
    raw=st.binary(max_size=80)
    | st.fixed_dictionaries({}, optional=dict.fromkeys(GOOD, json_values)).map(
        lambda fields: json.dumps({**GOOD, **fields}).encode()
    )
)
def test_any_line_is_either_right_or_refused(raw: bytes) -> None:
    # Whatever is in it, nothing but BadLineError comes out.
    with suppress(BadLineError):
        record = parse_line(raw)
        assert record.input_length >= 1
        assert record.output_length >= 0
        assert 0 <= record.timestamp_ms < 1e16
        assert len(record.hash_ids) == -(-record.input_length // 512)


def test_no_good_line_is_shorter_than_the_bound_says() -> None:
    shortest = b'{"timestamp":0,"input_length":1,"output_length":0,"hash_ids":[0]}'
    assert parse_line(shortest).input_length == 1
    assert len(shortest) >= SHORTEST_LINE_BYTES


@pytest.mark.parametrize(
    ("content", "lines"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"\n\n", 2)]
)
def test_lines_are_counted_also_without_a_last_line_end(
    tmp_path: Path, content: bytes, lines: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert count_lines(str(path)) == lines
    assert count_lines(str(path), at_most=1) == min(lines, 1)


def test_published_trace_reads_whole(trace_path: str) -> None:
    requests = hashes = tokens = 0
    distinct: set[bytes] = set()
    for request in MooncakeReader(trace_path, tokens_per_hash=512):
        requests += 1
        hashes += len(request.hashes)
        tokens += request.prompt_tokens + request.output_tokens
        distinct.update(request.hashes)
    # The ids were counted by hand: 276,491 full ones, of which 170,899 differ.
    assert (requests, hashes, tokens) == (12031, 276_491, 148_915_871)
    assert len(distinct) == 170_899


def test_published_trace_shares_the_same_prefixes_at_every_granularity(trace_path: str) -> None:
    def hit_tokens(tokens_per_hash: int) -> list[int]:
        seen: set[bytes] = set()
        hits = []
        for request in MooncakeReader(trace_path, tokens_per_hash=tokens_per_hash, requests=500):
            known = next((i for i, h in enumerate(request.hashes) if h not in seen), None)
            hits.append((len(request.hashes) if known is None else known) * tokens_per_hash)
            seen.update(request.hashes)
        return hits

    coarse = hit_tokens(512)
    assert sum(coarse) > 0
    assert hit_tokens(64) == coarse
    assert hit_tokens(16) == coarse
