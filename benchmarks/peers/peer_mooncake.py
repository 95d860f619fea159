"""Mooncake's store over TCP: a master, a process that gives the memory, and this one, a client."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mooncake.store
from peer_protocol import Bytes, Way, Work, child, cpu_s_of, die_with_parent, serve

SLACK = 1.25  # it begins to evict at 90 %
START_S = 30.0
BUFFER_BYTES = 64 << 20


def connect(master: str, segment_bytes: int, name: str) -> mooncake.store.MooncakeDistributedStore:
    store = mooncake.store.MooncakeDistributedStore()
    status = store.setup(*(name, "P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, "tcp", "", master))
    if status:
        raise RuntimeError(f"setup says {status}")
    return store


def give_memory(master: str, segment_bytes: int, ready: Path) -> None:
    """Hold a segment until the parent ends."""
    die_with_parent()
    store = connect(master, segment_bytes, "127.0.0.1")
    ready.touch()
    while store is not None:
        time.sleep(3600)


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


class MooncakeWay(Way):
    packages = ("mooncake-transfer-engine-non-cuda",)

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        rpc, metrics = free_ports(2)
        master = f"127.0.0.1:{rpc}"
        program = Path(sys.executable).parent / "mooncake_master"
        self._children = [
            child(
                [
                    *(str(program), f"--rpc_port={rpc}", f"--metrics_port={metrics}"),
                    *("--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"),
                ]
            )
        ]
        self._wait(lambda: _accepts(rpc), "the master")
        ready = Path(work.directory) / "ready"
        segment_bytes = int(work.capacity_blocks * work.block_bytes * SLACK) + (256 << 20)
        self._children.append(
            child([sys.executable, __file__, master, str(segment_bytes), str(ready)])
        )
        self._wait(ready.exists, "the process that gives memory")
        self._store = connect(master, 0, "127.0.0.1")
        for memory in (self.source, self.target):
            if status := self._store.register_buffer(memory.ctypes.data, memory.nbytes):
                raise RuntimeError(f"register_buffer says {status}")
        self._came: list[int] = []

    def _wait(self, is_there: object, what: str) -> None:
        until_s = time.monotonic() + START_S
        while not is_there():  # type: ignore[operator]
            if self._children[-1].poll() is not None:
                raise RuntimeError(f"{what} ended with {self._children[-1].returncode}")
            if time.monotonic() > until_s:
                raise RuntimeError(f"{what} is not there after {START_S:.0f} s")
            time.sleep(0.05)

    def store(self, keys: Sequence[str]) -> None:
        answers = self._store.batch_put_from(list(keys), *self._places(self.source, len(keys)))
        if any(answers):
            raise RuntimeError(f"batch_put_from says {[a for a in answers if a][:3]}")

    def load(self, keys: Sequence[str]) -> None:
        self._came = self._store.batch_get_into(list(keys), *self._places(self.target, len(keys)))

    def loaded(self, keys: Sequence[str]) -> list[Bytes | None]:
        whole = self.work.block_bytes
        return [
            self.target[row] if moved == whole else None for row, moved in enumerate(self._came)
        ]

    def done_with(self, keys: Sequence[str]) -> None:
        self._store.batch_remove(list(keys), True)

    def _places(self, memory: Bytes, count: int) -> tuple[list[int], list[int]]:
        size = self.work.block_bytes
        return [memory.ctypes.data + row * size for row in range(count)], [size] * count

    def cpu_s(self) -> float:
        return super().cpu_s() + sum(cpu_s_of(each.pid) for each in self._children)

    def close(self) -> None:
        self._store.close()
        for each in reversed(self._children):
            each.kill()
            each.wait()


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    # Its client would else copy within a process what goes over TCP elsewhere.
    os.environ.setdefault("MC_STORE_MEMCPY", "0")
    if len(sys.argv) > 1:
        give_memory(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    serve(MooncakeWay)
