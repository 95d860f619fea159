"""Whose turn a store is, where no other replica has to be waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from backends.testing import RowBuffer, make_keys
from backends.tier.base import Job
from backends.tier.jobs import Jobs, Task
from backends.tier.turns import Turns


class Storage:
    """What lets stores begin, and what has gone, by which thread."""

    def __init__(self) -> None:
        self.is_ready = True
        self.gone: list[tuple[list[Task], int]] = []
        self.turns = Turns(
            *("turns of a test", None),
            replica=0,
            replicas=1,
            stagger_s=0.0,
            ready=lambda: self.is_ready,
            go=lambda tasks: self.gone.append((tasks, threading.get_ident())),
        )

    @property
    def tasks(self) -> list[Task]:
        return [task for tasks, _ in self.gone for task in tasks]


@pytest.fixture
def storage() -> Iterator[Storage]:
    storage = Storage()
    yield storage
    storage.turns.stop()
    assert storage.turns.join(time.monotonic() + 20)


def stores(*ids: int) -> list[Task]:
    keys = make_keys("turns", len(ids))
    job = Job(0, keys, tuple(range(len(ids))))
    return Jobs(RowBuffer(len(ids), 8192)).submit(job, ids, 1000, is_load=False).tasks


def test_stores_go_at_once_by_whoever_brings_them(storage: Storage) -> None:
    tasks = stores(1, 2, 3)
    storage.turns.add(tasks)
    assert storage.gone == [(tasks, threading.get_ident())]


def test_stores_wait_until_they_may_begin(storage: Storage) -> None:
    storage.is_ready = False
    early, late = stores(1, 2), stores(3)
    storage.turns.add(early)
    time.sleep(0.05)
    assert storage.gone == []
    storage.is_ready = True
    # What came before goes before, or with it.
    storage.turns.add(late)
    end_s = time.monotonic() + 20
    while len(storage.tasks) < 3 and time.monotonic() < end_s:
        time.sleep(0.001)
    assert storage.tasks == [*early, *late]


def test_a_second_store_of_a_key_waits_for_the_first_and_is_given_when_that_ends(
    storage: Storage,
) -> None:
    first, second, third, other = stores(7, 7, 7, 8)
    storage.turns.add([first, second, other])
    storage.turns.add([third])
    assert storage.tasks == [first, other]
    assert storage.turns.ended([other, first]) == [second, third]
    storage.turns.add([second])
    assert storage.tasks == [first, other, second]
    assert storage.turns.ended([second]) == []


def test_what_has_ended_meanwhile_does_not_go(storage: Storage) -> None:
    early, late = stores(1, 2)
    early.ended = True
    storage.turns.add([early, late])
    assert storage.tasks == [late]
