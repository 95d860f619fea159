"""From a spec to requests: the same for every leader, checked before anything runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.workload import (
    WorkloadError,
    WorkloadSpec,
    check,
    count_requests,
    open_workload,
    stream_for_replica,
)
from orchestrator.workload.router import POLICIES


def write_trace(folder: Path, count: int = 40, bad_lines: int = 0) -> str:
    path = folder / "trace.jsonl"
    lines = ["bad"] * bad_lines
    for n in range(count):
        ids = [n % 3, 10 + n % 7, 100 + n]
        record = {"timestamp": 10 * n, "input_length": 1500, "output_length": n, "hash_ids": ids}
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(params=["trace", "multi_turn"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> WorkloadSpec:
    if request.param == "trace":
        return WorkloadSpec(kind="trace", path=write_trace(tmp_path))
    return WorkloadSpec(kind="multi_turn", seed=3)


def test_spec_survives_json(spec: WorkloadSpec) -> None:
    assert WorkloadSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("replicas", [1, 3])
def test_replicas_take_every_request_once(spec: WorkloadSpec, policy: str, replicas: int) -> None:
    spec = replace(spec, policy=policy)
    parts = [list(stream_for_replica(spec, replicas, index)) for index in range(replicas)]
    assert sorted((r for part in parts for r in part), key=lambda r: r.index) == list(
        open_workload(spec)
    )
    for part in parts:
        assert part
        assert [r.index for r in part] == sorted(r.index for r in part)


@pytest.mark.parametrize("requests", [None, 1, 25])
def test_count_is_the_length_of_the_stream(spec: WorkloadSpec, requests: int | None) -> None:
    spec = replace(spec, requests=requests)
    assert count_requests(spec) == len(list(open_workload(spec)))


def test_count_respects_the_offset(tmp_path: Path) -> None:
    spec = WorkloadSpec(kind="trace", path=write_trace(tmp_path, 10), offset=7)
    for requests in (None, 2, 5):
        limited = replace(spec, requests=requests)
        assert count_requests(limited) == len(list(open_workload(limited)))


def test_skipped_lines_are_told_by_every_replica(tmp_path: Path) -> None:
    path = write_trace(tmp_path, 10, bad_lines=3)
    spec = WorkloadSpec(kind="trace", path=path, on_bad_line="skip")
    for index in range(2):
        stream = stream_for_replica(spec, 2, index)
        taken = list(stream)
        assert taken
        assert stream.skipped == 3
        assert len(stream.skip_reasons) == 3


def test_replica_out_of_range_is_refused(spec: WorkloadSpec) -> None:
    for index in (-1, 2):
        with pytest.raises(WorkloadError, match=f"replica index is {index}"):
            stream_for_replica(spec, 2, index)


def test_what_is_right_has_no_problems(spec: WorkloadSpec) -> None:
    assert check(spec) == []
    assert check(WorkloadSpec()) == []


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"kind": "multiturn"}, "kind", "did you mean 'multi_turn'?"),
    ({"policy": "prefix_afinity"}, "policy", "did you mean 'prefix_affinity'?"),
    ({"policy": "zzz"}, "policy", "known: least_loaded"),
    ({"on_bad_line": "skp"}, "on_bad_line", "did you mean 'skip'?"),
    ({"requests": 0}, "requests", "is 0"),
    ({"requests": -3}, "requests", "is -3"),
    ({"tokens_per_s": 0.0}, "tokens_per_s", "is 0.0"),
    ({"tokens_per_s": float("nan")}, "tokens_per_s", "is nan"),
    ({"max_imbalance": 0.9}, "max_imbalance", "is 0.9"),
    ({"conversations": 0}, "conversations", "is 0"),
    ({"conversations": None}, "conversations", "set one"),
    ({"turns": 0.0}, "turns", "is 0.0"),
    ({"tokens_per_hash": 0}, "tokens_per_hash", "is 0"),
    ({"path": "x.jsonl"}, "path", "only workload=trace"),
    ({"offset": 5}, "offset", "only workload=trace"),
    ({"max_sequence_tokens": 1000}, "max_sequence_tokens", "at least 1538"),
    ({"kind": "trace"}, "path", "is not set"),
    ({"kind": "trace", "path": "/nowhere/t.jsonl"}, "path", "No such file"),
    ({"kind": "trace", "path": "/"}, "path", "is a directory"),
    ({"kind": "trace", "path": "a\0b"}, "path", "null"),
    ({"kind": "trace", "path": "TRACE", "offset": -1}, "offset", "is -1"),
    ({"kind": "trace", "path": "TRACE", "offset": 40}, "offset", "at most 40 requests"),
    ({"kind": "trace", "path": "TRACE", "offset": 10**9}, "offset", "holds at most"),
    ({"kind": "trace", "path": "TRACE", "tokens_per_hash": 48}, "tokens_per_hash", "is 48"),
    ({"kind": "trace", "path": "TRACE", "tokens_per_hash": 1024}, "tokens_per_hash", "is 1024"),
]


@pytest.mark.parametrize(("values", "field", "said"), WRONG)
def test_each_wrong_value_is_named(
    tmp_path: Path, values: dict[str, Any], field: str, said: str
) -> None:
    if values.get("path") == "TRACE":
        values = {**values, "path": write_trace(tmp_path)}
    spec = WorkloadSpec(**values)
    ((found, message),) = check(spec)
    assert found == field
    assert said in message
    with pytest.raises(WorkloadError, match=f"workload {field} "):
        open_workload(spec)


def test_all_that_is_wrong_is_told_at_once() -> None:
    spec = WorkloadSpec(policy="x", requests=0, turns=0, user_tokens=0, path="y")
    assert [field for field, _ in check(spec)] == [
        "policy",
        "requests",
        "turns",
        "user_tokens",
        "path",
    ]


def test_a_bad_first_line_is_seen_unless_bad_lines_are_skipped(tmp_path: Path) -> None:
    spec = WorkloadSpec(kind="trace", path=write_trace(tmp_path, bad_lines=1))
    ((field, message),) = check(spec)
    assert field == "path"
    assert "line 1 is bad: found bad JSON" in message
    assert check(replace(spec, on_bad_line="skip")) == []


def test_check_does_not_read_a_large_file_whole(tmp_path: Path) -> None:
    path = Path(write_trace(tmp_path))
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a hole of a terabyte: reading it would take minutes
    spec = WorkloadSpec(kind="trace", path=str(path), offset=10, requests=5)
    assert check(spec) == []
    assert count_requests(spec) == 5


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sed": 1}, "did you mean 'seed'?"),
        ({"requests": "5"}, r"'requests' is '5', expected int \| None"),
        ({"requests": True}, "'requests' is True"),
        ({"seed": None}, "'seed' is None"),
        ({"turns": "4"}, "'turns' is '4'"),
        ({"salt": 4}, "'salt' is 4"),
    ],
)
def test_values_of_a_wrong_type_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        WorkloadSpec.from_dict(values)


def test_whole_numbers_are_accepted_for_floats() -> None:
    assert WorkloadSpec.from_dict({"turns": 4, "tokens_per_s": 1}).turns == 4


def test_workloads_need_neither_torch_nor_hydra() -> None:
    probe = (
        "import sys, orchestrator.workload\n"
        "print(sorted({'torch', 'hydra', 'omegaconf'} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", probe],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert out.stdout.strip() == "[]"


def test_published_trace_is_served_to_four_replicas(trace_path: str) -> None:
    spec = WorkloadSpec(kind="trace", path=trace_path, requests=500)
    assert check(spec) == []
    assert count_requests(spec) == 500
    taken = [[r.index for r in stream_for_replica(spec, 4, index)] for index in range(4)]
    assert sorted(index for part in taken for index in part) == list(range(500))
    assert min(len(part) for part in taken) > 50
