"""What has to be done for one path from time to time: one thread, never the engine's.

It opens a path again that has failed, shows others that this writer lives, counts what dead writers
left and sweeps it, evicts before the path is full, and saves the index.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from backends.errors import TierError
from backends.tier.counters import Counters
from backends.tier.filesystem import naming, snapshot
from backends.tier.filesystem.evict import Evictor
from backends.tier.filesystem.ledger import Totals
from backends.tier.filesystem.ledgerfile import QUARANTINE_SHARD
from backends.tier.filesystem.room import Room
from backends.tier.filesystem.scan import Scanner
from backends.tier.filesystem.settings import FilesystemSettings
from backends.tier.filesystem.volume import Volume
from backends.tier.index import Index

_TICK_S: Final = 0.25
_BEAT_S: Final = 1.0
_SWEEP_S: Final = 30.0
_RESCAN_S: Final = 2.0
_RESCAN_SHARE: Final = 10.0
# So many blocks, or one part in so many, may be unknown without a new scan.
_UNKNOWN: Final = 4
_UNKNOWN_SHARE: Final = 50
# Stores that have paused for so long are over for now.
_PAUSE_S: Final = 1.0
# To have no spare files costs what comes next a hundred times what it costs to keep them.
_SPARES_S: Final = 60.0
_EVICT_STEP_BYTES: Final = 64 << 20
_NEVER_NS: Final = 1 << 62

_Paths: TypeAlias = Sequence[tuple[Volume, Evictor]]


class Keeper:
    """One path's. `scanned` is set when everything on it is known and counted."""

    def __init__(
        self,
        volume: Volume,
        namespace: str,
        index: Index,
        scanner: Scanner,
        evictor: Evictor,
        settings: FilesystemSettings,
        counters: Counters,
        counted: Callable[[], None],
    ) -> None:
        """`counted` is called when stores may begin, because what was there is counted."""
        self._volume = volume
        self._namespace = namespace
        self._index = index
        self._scanner = scanner
        self._evictor = evictor
        self._settings = settings
        self._counters = counters
        self._counted = counted
        self._others: _Paths = ()
        self.scanned = threading.Event()
        self.restored = threading.Event()
        self._kick = threading.Event()
        self._settled = threading.Event()
        self._settling = False
        self._stopped = False
        self._next_beat_s = self._next_sweep_s = self._next_scan_s = 0.0
        self._next_snapshot_s = time.monotonic() + settings.snapshot_interval_s
        self._over = False
        name = f"kvquay-fs-keeper-{volume.number}"
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self, others: _Paths = ()) -> None:
        """`others`: the tier's other paths, with which this one is one cache."""
        self._others = others
        self._thread.start()

    def kick(self) -> None:
        """There is something to do now."""
        self._kick.set()

    def stop(self) -> None:
        self._stopped = True
        self._kick.set()

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that is on the path now is known; False where it could not be read."""
        self._settled.clear()
        self._settling = True
        self.kick()
        return self._settled.wait(timeout_s)

    def stopped(self) -> bool:
        return self._stopped

    def join(self, end_s: float) -> bool:
        self._thread.join(max(0.0, end_s - time.monotonic()))
        return not self._thread.is_alive()

    def save(self) -> None:
        """Write a snapshot of what is known of this path. Without one a scan finds it all."""
        columns = self._index.columns(0, self._volume.number)
        with contextlib.suppress(OSError):
            self._volume.place.write_file(self._namespace, naming.SNAPSHOT, snapshot.pack(columns))

    def _serve(self) -> None:
        while not self._stopped:
            began_s = time.monotonic()
            try:
                self._tick(began_s)
            # It shows in `stores`, whose pause ends in the next attempt. TierError: for good.
            except (OSError, TierError) as error:
                self._volume.stores.failed(began_s, f"{self._volume.path}: {error}")
            self._kick.wait(_TICK_S)
            self._kick.clear()

    def _tick(self, now_s: float) -> None:
        volume = self._volume
        if not volume.stores.closed():
            return
        if volume.needs_opening():
            volume.open(make=False)
        if now_s >= self._next_beat_s:
            volume.ledger.beat()
            self._next_beat_s = now_s + _BEAT_S
        totals = volume.ledger.totals()
        if not self.restored.is_set():
            self._restore()
        if now_s >= self._next_sweep_s:
            self._counters.add("swept", volume.sweep())
            self._next_sweep_s = now_s + _SWEEP_S
        self._recount_for_the_dead()
        due = now_s >= self._next_scan_s and self._has_to_scan(totals)
        settling, self._settling = self._settling, False
        if due or not totals.counted or (settling and not self.scanned.is_set()):
            self._scan()
            # A scan of millions takes its time, and is not to take all of it.
            took_s = time.monotonic() - now_s
            self._next_scan_s = now_s + max(_RESCAN_S, _RESCAN_SHARE * took_s)
        self._settle_debts()
        self._evict()
        if settling and self.scanned.is_set() and self._scanner.look_again():
            self._settled.set()
        if now_s >= self._next_snapshot_s:
            self._next_snapshot_s = now_s + self._settings.snapshot_interval_s
            self.save()

    def _restore(self) -> None:
        # A snapshot that cannot be read, for whatever reason, is none: the scan finds it all.
        with contextlib.suppress(OSError):
            columns = snapshot.unpack(
                self._volume.place.read_file(self._namespace, naming.SNAPSHOT)
            )
            if columns is not None:
                self._index.add_many(columns, 0, self._volume.number)
        self.restored.set()

    def _has_to_scan(self, totals: Totals) -> bool:
        """Whether there is too much here that this process does not know, so cannot evict."""
        if not self.scanned.is_set():
            return True
        unknown = abs(totals.blocks - self._index.count(self._volume.number))
        return unknown > max(_UNKNOWN, totals.blocks // _UNKNOWN_SHARE)

    def _scan(self) -> None:
        self._index.generation += 1
        if not self._scanner.scan():
            return
        self._volume.ledger.totals()
        self._index.forget_unseen(self._volume.number)
        self.scanned.set()
        self._counted()

    def _recount_for_the_dead(self) -> None:
        """A writer that died has left files, and may have left a count that is wrong.

        Its reservation makes up for that until all is counted.
        """
        volume = self._volume
        for writer in volume.ledger.dead_writers():
            self._counters.add("swept", volume.place.empty_writer(writer))
            self._scanner.count_quarantine()
            for shard in range(naming.SHARDS):
                self._scanner.count(shard, exactly=True)
            volume.ledger.forget(writer)

    def _settle_debts(self) -> None:
        """Count what could not be counted when it changed, and delete what could not be deleted."""
        volume = self._volume
        volume.space.discard_again()
        owed = volume.space.owed()
        shards = volume.ledger.take_doubtful()
        try:
            for shard in shards:
                if shard == QUARANTINE_SHARD:
                    self._scanner.count_quarantine()
                else:
                    self._scanner.count(shard, exactly=True)
        except BaseException:
            volume.ledger.doubt(shards)
            raise
        if owed:
            volume.space.pay(owed)

    def _evict(self) -> None:
        """Above the high watermark, evict to the low one.

        While stores go on, what they need is evicted ahead of them and no more, for they write over
        the files. What is above the high watermark, and when they pause all the rest, is deleted.

        Several paths are one cache: what counts is what they hold together, and what goes is the
        oldest of all. A path that holds more than its part, or whose disk gives less, is by itself.
        """
        volume, settings = self._volume, self._settings
        spares = volume.space.spares
        idle_s = spares.idle_s()
        paused = idle_s > _PAUSE_S
        totals = volume.ledger.totals()
        if not totals.counted:
            return
        limit_bytes = volume.limit_bytes(totals)
        disk_is_full = limit_bytes < volume.quota_bytes
        if len(spares) and idle_s > (_PAUSE_S if disk_is_full else _SPARES_S):
            volume.space.drop_spares()
        paths = [(volume, self._evictor)]
        if not disk_is_full and totals.bytes <= volume.quota_bytes:
            paths += [
                (other, evictor)
                for other, evictor in self._others
                if other.is_open and other.stores.closed()
            ]
            limit_bytes *= len(paths)
        high_bytes = int(settings.high_watermark * limit_bytes)
        self._over = self._over or _held_bytes(paths) > high_bytes
        if not self._over:
            return
        low_bytes = int(settings.low_watermark * limit_bytes)
        if not paused and not disk_is_full and not volume.is_over():
            while len(spares) < spares.most and _held_bytes(paths) > low_bytes:
                if not self._evict_some(1, self._evictor, paths, spare=True):
                    break
        goal_bytes = low_bytes if paused or disk_is_full else high_bytes
        while (over_bytes := _held_bytes(paths) - goal_bytes) > 0:
            evictor = min((evictor for _, evictor in paths), key=_oldest_ns)
            if not self._evict_some(
                min(over_bytes, _EVICT_STEP_BYTES), evictor, paths, spare=False
            ):
                break
        self._over = _held_bytes(paths) > low_bytes

    def _evict_some(self, nbytes: int, evictor: Evictor, paths: _Paths, *, spare: bool) -> bool:
        """Evict one path's blocks, as long as they are not newer than the others' oldest."""
        if self._stopped:
            return False
        others = [_oldest_ns(other) + 1 for _, other in paths if other is not evictor]
        before_ns = min([time.time_ns(), *others])
        return evictor.make_room(nbytes, before_ns, spare=spare) is Room.MADE


def _oldest_ns(evictor: Evictor) -> int:
    oldest_ns = evictor.oldest_ns()
    return _NEVER_NS if oldest_ns is None else oldest_ns


def _held_bytes(paths: _Paths) -> int:
    """What counts against the watermarks: not what is being written, and not spare files.

    Those are reservations, and keep within the capacity on their own.
    """
    return sum(volume.ledger.totals().bytes for volume, _ in paths)
