"""NIXL's POSIX and OBJ backends, which move bytes between memory and files, or objects.

They keep no index and make no names: a block's file is opened here, for direct I/O where the disk
takes it, and gets its name before it is filled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")

from nixl_cu12 import nixl_agent, nixl_agent_config
from nixl_cu12._bindings import nixlBackendError
from peer_protocol import Bytes, Way, Work, serve

POLL_S = 20e-6


class NixlWay(Way):
    """As many transfers of one block are under way as `depth` says."""

    packages = ("nixl-cu12",)
    backend = ""
    segment = ""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._agent = nixl_agent("bench", nixl_agent_config(enable_prog_thread=False, backends=[]))
        self._agent.create_backend(self.backend, self._parameters())
        self._memory = [
            self._agent.register_memory(
                [(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM", backends=[self.backend]
            )
            for memory in (self.source, self.target)
        ]
        self._came: set[int] = set()

    def _parameters(self) -> dict[str, str]:
        raise NotImplementedError

    def _open(self, key: str, row: int, writes: bool) -> int | None:
        """What names the block to the backend; None where there is none."""
        raise NotImplementedError

    def _close(self, device: int) -> None:
        pass

    def _run(self, keys: Sequence[str], memory: Bytes, writes: bool) -> set[int]:
        """The rows whose transfers went well."""
        done: set[int] = set()
        begun: dict[int, Any] = {}
        left: Iterator[tuple[int, str]] = iter(enumerate(keys))
        ended = False
        while begun or not ended:
            while not ended and len(begun) < self.work.depth:
                row, key = next(left, (-1, ""))
                if row < 0:
                    ended = True
                elif (device := self._open(key, row, writes)) is not None:
                    begun[row] = self._begin(key, device, memory[row], writes)
            before = len(begun)
            for row, (handle, registered, device) in list(begun.items()):
                try:
                    state = self._agent.check_xfer_state(handle)
                except nixlBackendError:  # it says no more than that
                    state = "ERR"
                if state == "PROC":
                    continue
                self._agent.release_xfer_handle(handle)
                self._agent.deregister_memory(registered, backends=[self.backend])
                self._close(device)
                del begun[row]
                if state == "DONE":
                    done.add(row)
            if len(begun) == before:
                time.sleep(POLL_S)
        return done

    def _begin(self, key: str, device: int, row: Bytes, writes: bool) -> tuple[Any, Any, int]:
        size = self.work.block_bytes
        registered = self._agent.register_memory(
            [(0, size, device, key)], self.segment, backends=[self.backend]
        )
        local = self._agent.get_xfer_descs([(row.ctypes.data, size, 0)], "DRAM")
        handle = self._agent.initialize_xfer(
            "WRITE" if writes else "READ",
            local,
            registered.trim(),
            "bench",
            backends=[self.backend],
        )
        self._agent.transfer(handle)
        return handle, registered, device

    def store(self, keys: Sequence[str]) -> None:
        done = self._run(keys, self.source, True)
        if len(done) != len(keys):
            raise RuntimeError(f"{len(keys) - len(done)} of {len(keys)} transfers failed")

    def load(self, keys: Sequence[str]) -> None:
        self._came = self._run(keys, self.target, False)

    def loaded(self, keys: Sequence[str]) -> list[Bytes | None]:
        return [self.target[row] if row in self._came else None for row in range(len(keys))]


class PosixWay(NixlWay):
    backend, segment = "POSIX", "FILE"

    def __init__(self, work: Work) -> None:
        self._directory = Path(work.directory)
        self._direct = _direct_flag(self._directory)
        super().__init__(work)

    def _parameters(self) -> dict[str, str]:
        return dict(self._agent.get_plugin_params(self.backend))

    def _open(self, key: str, row: int, writes: bool) -> int | None:
        how = os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY
        try:
            return os.open(self._directory / key, how | self._direct, 0o600)
        except FileNotFoundError:
            return None

    def _close(self, device: int) -> None:
        os.close(device)


class ObjectWay(NixlWay):
    """Credentials come from the environment."""

    backend, segment = "OBJ", "OBJ"

    def _parameters(self) -> dict[str, str]:
        options = self.work.options
        return {
            "bucket": options["bucket"],
            "endpoint_override": options["endpoint"],
            "scheme": "http",
            "region": options["region"],
            "use_virtual_addressing": "false",
            "num_threads": str(self.work.depth),
        }

    def _open(self, key: str, row: int, writes: bool) -> int | None:
        return row + 1

    def _begin(self, key: str, device: int, row: Bytes, writes: bool) -> tuple[Any, Any, int]:
        prefix = self.work.options["prefix"]
        return super()._begin(f"{prefix}/{key}", device, row, writes)


def _direct_flag(directory: Path) -> int:
    probe = directory / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError:
        return 0
    finally:
        probe.unlink(missing_ok=True)
    return os.O_DIRECT


def make(work: Work) -> Way:
    return PosixWay(work) if work.options["kind"] == "posix" else ObjectWay(work)


if __name__ == "__main__":
    serve(make)
