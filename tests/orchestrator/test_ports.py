"""Ports of metrics and events: planned one a replica, and refused where two would be the same."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from orchestrator.plan import read_plan
from orchestrator.problems import ConfigProblems, Problem
from orchestrator.validate import validate
from tests.kit import compose_config, plan_for

ELSEWHERE = "spawn.check_machine=false"


def problems(tmp_path: Path, *overrides: str) -> tuple[Problem, ...]:
    try:
        validate(compose_config(*overrides), tmp_path)
    except ConfigProblems as error:
        return error.problems
    return ()


def test_both_are_off_unless_asked_for(tmp_path: Path) -> None:
    for replica in plan_for(tmp_path).replicas:
        assert replica.metrics_port == replica.events_port == replica.events_replay_port == 0


def test_each_replica_has_a_port_of_its_own_of_each_kind(tmp_path: Path) -> None:
    asked = ("metrics.port=9400", "events.port=5557", "events.replay_port=6557", ELSEWHERE)
    plan_for(tmp_path, "parallel=dp4_tp1", *asked)
    plan = read_plan(tmp_path / "plan.json")
    assert [replica.metrics_port for replica in plan.replicas] == [9400, 9401, 9402, 9403]
    assert [replica.events_port for replica in plan.replicas] == [5557, 5558, 5559, 5560]
    assert [replica.events_replay_port for replica in plan.replicas] == [6557, 6558, 6559, 6560]


@pytest.mark.parametrize(
    ("overrides", "key", "told"),
    [
        (("metrics.port=9400", "events.port=9403"), "events.port", "metrics.port, 9400 to 9403"),
        (("metrics.port=9403", "events.port=9400"), "events.port", "metrics.port, 9403 to 9406"),
        (("metrics.port=9400", "spawn.rdzv_port=9399"), "metrics.port", "spawn.rdzv_port"),
        (("events.port=5557", "events.replay_port=5560"), "events.replay_port", "events.port"),
        (("metrics.port=65533",), "metrics.port", "65533 to 65536 must lie in 1 to 65535"),
        (("events.port=65535",), "events.port", "65535 to 65538"),
        (("events.replay_port=5557",), "events.replay_port", "events.port=0 has none"),
        (("metrics.host=localhost",), "metrics.host", "must be an IP address"),
        (("events.host=*",), "events.host", "must be an IP address"),
        (("events.hashes=int32",), "events.hashes", "must be one of int64, bytes"),
        (("metrics.port=-1",), "metrics.port", "must be between 0 and 65535"),
        (("metrics.refresh_s=-1",), "metrics.refresh_s", "must be between 0 and 3600"),
    ],
)
def test_what_cannot_be_is_told(
    tmp_path: Path, overrides: tuple[str, ...], key: str, told: str
) -> None:
    found = problems(tmp_path, "parallel=dp4_tp1", ELSEWHERE, *overrides)
    assert [problem.key for problem in found] == [key]
    assert told in str(found[0])


def test_ports_next_to_each_other_are_right(tmp_path: Path) -> None:
    asked = ("metrics.port=9400", "events.port=9404", "events.replay_port=9408")
    assert problems(tmp_path, "parallel=dp4_tp1", ELSEWHERE, *asked) == ()


def test_the_fix_for_ports_that_meet_works(tmp_path: Path) -> None:
    asked = ("parallel=dp4_tp1", ELSEWHERE, "metrics.port=9400", "events.port=9402")
    [problem] = problems(tmp_path, *asked)
    assert problem.fix.startswith("set events.port=")
    assert problems(tmp_path, *asked, problem.fix.removeprefix("set ")) == ()


def test_a_port_that_somebody_has_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        [problem] = problems(tmp_path, "parallel=dp1_tp1", f"metrics.port={port}")
        assert problem.key == "metrics.port"
        assert f"ports in use on this machine: {port}" in str(problem)
        assert problems(tmp_path, "parallel=dp1_tp1", f"metrics.port={port}", ELSEWHERE) == ()


def test_an_address_that_is_not_this_machine_s_is_told(tmp_path: Path) -> None:
    asked = ("metrics.port=29400", "metrics.host=192.0.2.1")
    [problem] = problems(tmp_path, *asked)
    assert problem.key == "metrics.host"
    assert "is not an address of this machine" in str(problem)
