"""What each job of a sweep leaves for the sweep's page: one small file, whoever ran the job.

Jobs may run in processes that the launcher does not know, started by a launcher plugin, and may
die. A job writes its record when it begins and again when it has ended: one that is `running` when
the sweep is over has died. Records stand in `<sweep dir>/.jobs/`, `<number>.json`, and carry the
sweep's id, so that those of an earlier sweep in the same directory are told apart.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orchestrator.job import EXIT_FAILED, EXIT_OK, Outcome
from orchestrator.plan import write_atomic

RUNNING = "running"
ENDED = "ended"
RESUMED = "resumed"
NOT_RUN = "not run"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `result_dir` holds its report, which is another run's where it was RESUMED."""

    sweep: str
    number: int
    run_id: str
    run_dir: str
    overrides: tuple[str, ...]
    state: str = RUNNING
    exit_status: int = EXIT_FAILED
    reason: str = ""
    log: str = ""
    began_s: float = 0.0
    ended_s: float | None = None
    result_dir: str | None = None

    @property
    def well(self) -> bool:
        return self.exit_status == EXIT_OK and self.state in (ENDED, RESUMED)


class Records:
    """Those of one sweep, in its directory."""

    def __init__(self, sweep_dir: Path, sweep: str) -> None:
        self._directory = sweep_dir / ".jobs"
        self._sweep = sweep

    def begin(self, number: int, run_id: str, run_dir: Path, overrides: Sequence[str]) -> JobRecord:
        """Write that a job has begun."""
        record = JobRecord(
            sweep=self._sweep,
            number=number,
            run_id=run_id,
            run_dir=str(run_dir),
            overrides=tuple(overrides),
            reason="the job ended without a word; its process was killed, or crashed",
            log=str(run_dir),
            began_s=time.time(),
        )
        self._write(record)
        return record

    def end(self, record: JobRecord, outcome: Outcome) -> JobRecord:
        """Write how it ended."""
        elsewhere = outcome.resumed_from
        ended = msgspec.structs.replace(
            record,
            state=ENDED if elsewhere is None else RESUMED,
            exit_status=outcome.exit_status,
            reason=outcome.reason,
            log=outcome.log,
            ended_s=time.time(),
            result_dir=str(elsewhere) if elsewhere else record.run_dir,
        )
        self._write(ended)
        return ended

    def skip(self, record: JobRecord, reason: str) -> JobRecord:
        """Write that it was not run at all."""
        skipped = msgspec.structs.replace(
            record, state=NOT_RUN, reason=reason, log="", ended_s=time.time()
        )
        self._write(skipped)
        return skipped

    def _write(self, record: JobRecord) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self._directory / f"{record.number}.json", msgspec.json.encode(record))

    def read(self) -> list[JobRecord]:
        """Every record of this sweep, by number. What cannot be read is no record."""
        found = []
        for path in self._directory.glob("*.json"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
                if record.sweep == self._sweep:
                    found.append(record)
        return sorted(found, key=lambda record: record.number)

    @property
    def _stop(self) -> Path:
        return self._directory / f"stop-{self._sweep}"

    def stop(self, number: int) -> None:
        """Let no job begin any more, in whatever process, because this one has failed."""
        with contextlib.suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            descriptor = os.open(self._stop, flags, 0o600)
            os.write(descriptor, str(number).encode())
            os.close(descriptor)

    def stopped_by(self) -> str | None:
        """The number of the job for whose failure no other may begin."""
        try:
            return self._stop.read_text()
        except OSError:
            return None
