"""Who is measured at what: peers with their environments, and their ways to keep blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
OURS: Final = "kvquay"
TRANSFER_PARTS: Final = ("filesystem", "memory", "object")
PARTS: Final = (*TRANSFER_PARTS, "faults", "metadata", "startup")


@dataclass(frozen=True, slots=True)
class Peer:
    """An environment. `torch_first`: torch is installed before the requirements, in the release
    that this project uses, so that no other one comes. `without`: packages that come along, are
    built for another torch, and are taken out again."""

    name: str
    torch_first: bool = False
    without: tuple[str, ...] = ()

    @property
    def requirements(self) -> Path:
        return HERE / f"requirements-{self.name}.txt"


@dataclass(frozen=True, slots=True)
class WaySpec:
    """One row of a part. `module` is a script here, or an absolute path.

    `publish` and `bounds` say what was read in the peer's source: how a block gets its name, and
    what keeps the place from overflowing. What damage and a restart do is tried; `checksum` and
    `restart` say it for memory, where it cannot be.
    """

    name: str
    peer: str
    part: str
    module: str
    options: Mapping[str, object] = field(default_factory=dict)
    publish: str = ""
    bounds: str = ""
    checksum: str = "not tried"
    restart: str = "not tried"

    @property
    def script(self) -> Path:
        return HERE / self.module


PEERS: Final = {
    peer.name: peer
    for peer in (
        Peer("mooncake"),
        Peer("nixl", torch_first=True),
        Peer("lmcache", torch_first=True),
        Peer("aibrix", torch_first=True),
        Peer("vllm", torch_first=True, without=("torchvision", "torchaudio", "torchcodec")),
    )
}

WAYS: Final[Sequence[WaySpec]] = (
    WaySpec(
        *("kvquay fs", OURS, "filesystem", "peer_kvquay.py", {"kind": "fs"}),
        publish="own temporary name, rename",
        bounds="exact quota over all processes, LRU",
    ),
    WaySpec(
        *("vllm fs, Python I/O", "vllm", "filesystem", "peer_vllm.py", {"c": False}),
        publish="own temporary name, rename",
        bounds="none",
    ),
    WaySpec(
        *("vllm fs, C I/O", "vllm", "filesystem", "peer_vllm.py", {"c": True}),
        publish="own temporary name, rename",
        bounds="none",
    ),
    WaySpec(
        *("lmcache fs", "lmcache", "filesystem", "peer_lmcache.py", {"kind": "fs"}),
        publish="rename; one temporary name a key",
        bounds="none",
    ),
    WaySpec(
        *("lmcache fs, O_DIRECT", "lmcache", "filesystem", "peer_lmcache.py"),
        {"kind": "fs", "direct": True},
        publish="rename; one temporary name a key",
        bounds="none",
    ),
    WaySpec(
        *("lmcache fs_native", "lmcache", "filesystem", "peer_lmcache.py", {"kind": "fs_native"}),
        publish="rename; one temporary name a key",
        bounds="watermark, where switched on; what this process stored",
    ),
    WaySpec(
        *("lmcache fs_native, O_DIRECT", "lmcache", "filesystem", "peer_lmcache.py"),
        {"kind": "fs_native", "direct": True},
        publish="rename; one temporary name a key",
        bounds="watermark, where switched on; what this process stored",
    ),
    WaySpec(
        *("nixl POSIX", "nixl", "filesystem", "peer_nixl.py", {"kind": "posix"}),
        publish="the caller's: here none",
        bounds="the caller's",
    ),
    WaySpec(
        *("aibrix L2 SHFS", "aibrix", "filesystem", "peer_aibrix.py", {"kind": "shfs"}),
        publish="rename; one temporary name a key",
        bounds="none",
    ),
    WaySpec(
        *("aibrix L2 RocksDB", "aibrix", "filesystem", "peer_aibrix.py", {"kind": "rocksdb"}),
        publish="write-ahead log; one process",
        bounds="time to live, 600 s",
    ),
    WaySpec(
        *("kvquay region", OURS, "memory", "peer_kvquay.py", {"kind": "region"}),
        publish="complete on all ranks",
        bounds="rows, policy by name",
        checksum="made when it leaves the region",
        restart="lost with the replica",
    ),
    WaySpec(
        *("mooncake store, TCP", "mooncake", "memory", "peer_mooncake.py"),
        publish="put ends at the master",
        bounds="watermark, leases",
        restart="kept while the process lives that gives the memory",
    ),
    WaySpec(
        *("aibrix L1", "aibrix", "memory", "peer_aibrix.py", {"kind": "l1"}),
        publish="one process",
        bounds="capacity, S3-FIFO",
        restart="lost with the process",
    ),
    WaySpec(
        *("lmcache L1", "lmcache", "memory", "peer_lmcache.py", {"kind": "l1"}),
        publish="write lock",
        bounds="watermark, LRU",
        restart="lost with the process",
    ),
    WaySpec(
        *("kvquay object", OURS, "object", "peer_kvquay.py", {"kind": "object"}),
        publish="create-only put",
        bounds="quota over all processes, or a lifecycle rule",
    ),
    WaySpec(
        *("nixl OBJ", "nixl", "object", "peer_nixl.py", {"kind": "obj"}),
        publish="put",
        bounds="the caller's",
    ),
    WaySpec(
        *("lmcache s3", "lmcache", "object", "peer_lmcache.py", {"kind": "s3"}),
        publish="put",
        bounds="watermark, where switched on; what this process stored",
    ),
)


def ways_of(part: str, only: Sequence[str] = ()) -> list[WaySpec]:
    """The ways of a part, ours first. `only` are peers' names; ours is always there, because the
    ratios are to it."""
    return [
        way
        for way in WAYS
        if way.part == part and (not only or way.peer in only or way.peer == OURS)
    ]
