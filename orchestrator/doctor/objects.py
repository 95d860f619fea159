"""The object store: may it be used, what can it do, how fast is it, and does its clock agree?

Measured with the tier's own client, below `doctor/<writer>/`, and removed again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from backends.errors import TierError
from backends.tier.filesystem.transfer import Scratch
from backends.tier.filesystem.writer import Writer, parse_writer, this_writer
from backends.tier.object.doctor import (
    NoAccess,
    ObjectBench,
    why_no_connection,
)
from backends.tier.object.faults import Sick, StoreFault
from backends.tier.object.settings import UNBOUNDED, ObjectSettings
from backends.tier.object.tier import ObjectTier
from orchestrator import object_store
from orchestrator.doctor.bounded import Stop
from orchestrator.doctor.drive import alternate, drive, rates
from orchestrator.doctor.loads import PLACE, LoadBench
from orchestrator.doctor.notes import Notes
from orchestrator.doctor.places import Directory
from orchestrator.doctor.result import Curve, ObjectFigures, Transfers
from orchestrator.doctor.sample import Sample
from orchestrator.doctor.uploads import OLD_S, check_leftovers

_KEY: Final = object_store.KEY
_REQUEST_S: Final = 10.0
_READ_S: Final = 4.0
_CONNECT_S: Final = 3.0
_MOST_BYTES: Final = 256 << 20
_MOST_OBJECTS: Final = 1024
_LOOKUPS: Final = 50
_DELETERS: Final = 16
_SKEW_S: Final = 5.0
_SKEW_MOST_S: Final = 900.0
"""S3 refuses requests that were signed longer ago, or as far ahead."""
_SKEWED: Final = "RequestTimeTooSkewed"
_CLOCK_FIX: Final = "set this machine's clock (chronyc makestep, timedatectl set-ntp true)"


def measure_store(
    settings: ObjectSettings,
    way: str,
    environment: Mapping[str, str],
    sample: Sample,
    notes: Notes,
    stop: Stop,
    seconds: float,
    loads_s: float,
) -> ObjectFigures:
    """Everything about the store; storing and loading take about `seconds` each, loading through
    the tier `loads_s`. What is wrong stands in `notes`, in checks `object.*`. `way` tells in words
    how it is reached."""
    nothing = ObjectFigures(url=settings.url, block_bytes=sample.block_bytes)
    problems = list(object_store.check_credentials(settings, environment))
    for problem in problems:
        notes.fail("object.credentials", f"{problem.key} {problem.limit}", "", problem.fix)
    if problems:
        return nothing
    store = _Store(_hasty(settings), way, sample, notes, stop, seconds, loads_s)
    try:
        with _directory(settings):
            return store.measure() or nothing
    except OSError as error:
        notes.fail(
            "object.access",
            f"{settings.prefix} cannot be made: {error.strerror}",
            "a directory that this user may write to",
            f"change {_KEY}.url, or give this user the rights",
        )
    except TierError as error:
        limit, _, fix = str(error).partition("; ")
        notes.fail("object.access", limit, "a store that can be used", fix)
    return nothing


def _hasty(settings: ObjectSettings) -> ObjectSettings:
    """A store that is slower than this is of no use, and nobody waits for it here."""
    return replace(
        settings,
        request_timeout_s=min(settings.request_timeout_s, _REQUEST_S),
        read_timeout_s=min(settings.read_timeout_s, _READ_S),
        connect_timeout_s=min(settings.connect_timeout_s, _CONNECT_S),
        retries=0,
    )


def _directory(settings: ObjectSettings) -> contextlib.AbstractContextManager[object]:
    if settings.scheme == "file":
        return Directory(settings.prefix)
    return contextlib.nullcontext()


class _Store:
    def __init__(
        self,
        settings: ObjectSettings,
        way: str,
        sample: Sample,
        notes: Notes,
        stop: Stop,
        seconds: float,
        loads_s: float,
    ) -> None:
        self._settings = settings
        self._loads_s = loads_s
        self._way = way
        self._sample = sample
        self._notes = notes
        self._stop = stop
        self._seconds = seconds
        self._rows = Scratch(sample.block_bytes)
        self._wrong: list[str] = []
        self._has_tier = False
        self._bench: ObjectBench

    def measure(self) -> ObjectFigures | None:
        """None where the store cannot be used. Raises TierError."""
        owner = this_writer()
        with self._open(owner):
            conditional = self._try_access()
            if conditional is None:
                return None
            try:
                self._sweep(owner)
                skew_s = self._check_clock()
                figures = self._transfers(conditional, skew_s)
                figures = msgspec.structs.replace(figures, load_curve=self._loads(owner))
            except StoreFault as error:
                self._notes.fail(
                    "object.requests",
                    f"{error} while {self._notes.step}",
                    "a store that answers every request",
                    "look at the server's log, and at the network between",
                )
                figures = None
        if not self._stop.asked():
            check_leftovers(self._settings, self._notes)
        return figures

    @contextlib.contextmanager
    def _open(self, owner: Writer) -> Iterator[None]:
        self._bench = bench = ObjectBench(self._settings, owner.name)
        try:
            yield
        finally:
            self._delete()
            bench.close()

    def _try_access(self) -> bool | None:
        """Whether create-only puts work; None where nothing does."""
        notes, settings = self._notes, self._settings
        notes.doing("trying to write, read, list and delete")
        began_s = time.monotonic()
        try:
            conditional = self._bench.try_access()
        except NoAccess as error:
            limit, _, fix = str(error).removeprefix(f"{settings.url}: ").partition("; ")
            names = {"bucket": "object.bucket", "credentials": "object.credentials"}
            if _SKEWED in limit:
                expected = "a clock that differs by less than 15 minutes from the store's"
                notes.fail("object.clock", limit, expected, _CLOCK_FIX)
            else:
                expected = {
                    "bucket": "a bucket that is there",
                    "credentials": "the right to write, read, list and delete",
                    "room": "room for objects",
                    "other": "a store that does what the tier asks of it",
                }[error.kind]
                notes.fail(names.get(error.kind, "object.access"), limit, expected, fix)
            return None
        except StoreFault as error:
            took_s = time.monotonic() - began_s
            why = why_no_connection(settings, _CONNECT_S)
            where = settings.endpoint or "the provider's endpoint"
            found = why or f"{where}: {error}, after {took_s:.1f} s"
            if not why and isinstance(error, Sick) and error.kind == "timeout":
                found = f"{where} takes connections, and answers no request within {took_s:.1f} s"
            notes.fail(
                "object.endpoint",
                found,
                "a server that answers",
                f"start the server, correct {_KEY}.endpoint, or look at the firewall between",
            )
            return None
        notes.ok("object.endpoint", self._way)
        notes.ok("object.access", "writes, reads, lists and deletes")
        self._check_conditional(conditional)
        return conditional

    def _check_conditional(self, conditional: bool) -> None:
        notes = self._notes
        if conditional:
            notes.ok("object.conditional_put", "a put that is to create only does so")
        elif self._settings.conditional == "off":
            notes.ok("object.conditional_put", f"not used: {_KEY}.conditional=off")
        else:
            notes.warn(
                "object.conditional_put",
                "a put that is to create only overwrites",
                "If-None-Match: * is honoured",
                "nothing has to be done: the tier looks before it stores, which costs a request "
                "more, and two replicas may now and then upload one block twice",
            )

    def _sweep(self, owner: Writer) -> None:
        self._notes.doing("sweeping what dead doctors left")

        def is_dead(name: str, age_s: float) -> bool:
            writer = parse_writer(name)
            if writer is None:
                return False
            alive = writer.alive(owner.host)
            return age_s > OLD_S if alive is None else not alive

        swept = self._bench.sweep(is_dead)
        if swept:
            self._notes.ok("object.swept", f"removed {swept} objects of doctors that were killed")

    def _check_clock(self) -> float | None:
        notes = self._notes
        notes.doing("comparing clocks")
        skew_s = self._bench.clock_skew_s()
        if skew_s is None:
            notes.warn(
                "object.clock",
                "a new object is not in the listing that follows",
                "listings that show what was stored",
                f"nothing has to be done: blocks of others are seen after {_KEY}.rescan_s",
            )
        elif abs(skew_s) > _SKEW_S:
            ahead = "ahead of" if skew_s > 0 else "behind"
            found = f"the store's clock is {abs(skew_s):.0f} s {ahead} this machine's"
            expected = (
                f"less than {_SKEW_S:.0f} s: machines that share {_KEY}.capacity tell by their "
                "clocks who is alive"
            )
            told = notes.fail if abs(skew_s) >= _SKEW_MOST_S else notes.warn
            told("object.clock", found, expected, _CLOCK_FIX)
        else:
            notes.ok("object.clock", f"within {max(1.0, abs(skew_s)):.0f} s of this machine's")
        return skew_s

    def _transfers(self, conditional: bool, skew_s: float | None) -> ObjectFigures:
        notes, block_bytes = self._notes, self._sample.block_bytes
        depth = self._sample.depth(self._settings.in_flight_blocks(block_bytes))
        alone, together = alternate(
            self._put,
            self._get,
            depth=depth,
            most=min(_MOST_OBJECTS, max(1, _MOST_BYTES // block_bytes)),
            seconds=self._seconds,
            nbytes=block_bytes,
            notes=notes,
            stop=self._stop,
            prepare=lambda: self._sample.fill(self._rows.get(), 0),
        )
        notes.doing("looking up blocks")
        lookups = drive(
            self._look_up,
            depth=1,
            most=_LOOKUPS,
            seconds=self._seconds / 3,
            nbytes=0,
            stop=self._stop,
        )
        latency = lookups.latency_s if lookups else None
        if self._wrong:
            notes.fail(
                "object.bytes",
                f"{len(self._wrong)} blocks came back wrong; the first {self._wrong[0]}",
                "the bytes that were stored",
                "look for what changes them: a proxy, the network, the server's disks",
            )
        if latency is not None:
            p50, p99 = latency.p50 * 1e3, latency.p99 * 1e3
            notes.ok("object.latency", f"a lookup takes {p50:.1f} ms, p99 {p99:.1f} ms")
        notes.ok("object.bandwidth", together.words(block_bytes))
        return ObjectFigures(
            url=self._settings.url,
            block_bytes=block_bytes,
            depth=depth,
            latency_s=latency,
            conditional_put=conditional,
            clock_skew_s=skew_s,
            alone=Transfers(depth=1, **rates(alone)),
            **rates(together),
        )

    def _loads(self, owner: Writer) -> Curve | None:
        """Through a tier of our own, which stands where this doctor's objects are."""
        if self._settings.scheme == "memory" or self._stop.asked():
            return None
        self._has_tier = True
        own = replace(
            self._settings,
            url=f"{self._settings.url.rstrip('/')}/{PLACE}/{owner.name}",
            capacity=UNBOUNDED,
            placement="per_replica",
        )
        bench = LoadBench(self._sample, self._notes, self._stop, self._loads_s)
        return bench.measure("object", lambda context: ObjectTier(context, own))

    def _put(self, number: int) -> None:
        row = self._rows.get()
        self._sample.fill(row, number)
        self._bench.store(number, row)

    def _get(self, number: int) -> None:
        data, row = self._bench.load(number, self._sample.block_bytes), self._rows.get()
        row[: data.size] = data
        wrong = self._sample.wrong(row[: data.size], number)
        if wrong:
            self._wrong.append(wrong)

    def _look_up(self, number: int) -> None:
        self._bench.size(0)

    def _delete(self) -> None:
        """Whatever was put, also after a failure or a signal; what stays, the next doctor finds."""
        names = self._bench.names
        if self._has_tier:
            with contextlib.suppress(StoreFault):
                names = self._bench.listed()
        if not names:
            return
        self._notes.doing("removing what was measured with")
        many = self._settings.scheme == "s3"
        parts = [names] if many else [names[first::_DELETERS] for first in range(_DELETERS)]
        parts = [part for part in parts if part]
        with contextlib.suppress(StoreFault):
            drive(
                lambda number: self._bench.delete(parts[number]),
                depth=len(parts),
                most=len(parts),
                seconds=_REQUEST_S,
                nbytes=0,
                stop=Stop(_REQUEST_S),
            )
