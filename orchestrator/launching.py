"""What Hydra calls for each job, in whatever process it calls it.

A launcher plugin sends the task function to other processes. `JobEntry` goes along without what
belongs to one process: no console, no process that is kept, no environment with its secrets.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from orchestrator import app
from orchestrator.job import Job, Outcome
from orchestrator.spawn.lifeline import die_with_parent
from orchestrator.spawn.nursery import Nursery
from orchestrator.sweep.record import Records

FILE_WIDTH = 200
FULL_ERROR = "HYDRA_FULL_ERROR"


def open_console(*, stderr: bool, alone: bool = True) -> Console:
    """As wide as the terminal; a file or a pipe gets lines that are not cut.

    What is shown may hold anything that a user typed, so nothing in it is markup. A job that is not
    `alone` shares its terminal with others, and never draws on it.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    console = Console(
        stderr=stderr,
        markup=False,
        highlight=False,
        emoji=False,
        force_terminal=None if alone else False,
    )
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


class JobEntry:
    """The task function. `bugs` and `outcomes` are those of this process."""

    def __init__(self, run_id: str, full_error: bool, launcher_pid: int | None = None) -> None:
        """`full_error`: the user asked for tracebacks. `launcher_pid`: of another process."""
        self._run_id = run_id
        self._full_error = full_error
        self._launcher_pid = launcher_pid
        self._console = open_console(stderr=False, alone=launcher_pid is None)
        self._errors = open_console(stderr=True, alone=launcher_pid is None)
        self._nursery: Nursery | None = Nursery() if launcher_pid is None else None
        self.begun = 0
        self.outcomes: list[Outcome] = []
        self.bugs: list[Exception] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return JobEntry, (self._run_id, self._full_error, self._launcher_pid or os.getpid())

    def close(self) -> None:
        if self._nursery is not None:
            self._nursery.close()

    def __call__(self, cfg: DictConfig) -> None:
        """Do one job. Raises SystemExit where a signal ended it, which ends a sweep as well."""
        if self._launcher_pid is not None and os.getppid() == self._launcher_pid:
            die_with_parent(self._launcher_pid, signal.SIGTERM)
        hydra_config = HydraConfig.get()
        self.begun += 1
        if hydra_config.mode == RunMode.MULTIRUN:
            outcome = self._job_of_sweep(cfg, hydra_config)
        else:
            outcome = self._do(cfg, self._job(hydra_config, None))
        if outcome is not None:
            self.outcomes.append(outcome)
            if outcome.signal is not None:
                raise SystemExit(128 + outcome.signal)

    def _job_of_sweep(self, cfg: DictConfig, hydra_config: HydraConf) -> Outcome | None:
        number = int(hydra_config.job.num)
        job = self._job(hydra_config, number)
        assert job.sweep_dir is not None
        records = Records(job.sweep_dir, self._run_id)
        record = records.begin(number, job.run_id, job.run_dir, job.overrides)
        stopped_by = records.stopped_by()
        if stopped_by is not None:
            records.skip(record, f"sweep.on_failure=stop, and job {stopped_by} had failed")
            return None
        try:
            outcome = self._do(cfg, job)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            outcome = Outcome(1, None, reason, log=str(job.run_dir / "launch.log"))
            records.end(record, outcome)
            self._stop_if_asked(cfg, records, number)
            raise
        records.end(record, outcome)
        if outcome.exit_status:
            self._stop_if_asked(cfg, records, number)
        return outcome

    def _stop_if_asked(self, cfg: DictConfig, records: Records, number: int) -> None:
        asked = None
        with contextlib.suppress(Exception):  # a configuration that is wrong asks for nothing
            asked = OmegaConf.select(cfg, "sweep.on_failure")
        if asked == "stop":
            records.stop(number)

    def _do(self, cfg: DictConfig, job: Job) -> Outcome:
        try:
            return app.run(cfg, job, self._console, self._errors)
        except OSError:
            raise
        except Exception as error:
            self.bugs.append(error)
            raise

    def _job(self, hydra_config: HydraConf, number: int | None) -> Job:
        """`number` is None where there is one job alone."""
        environment = dict(os.environ)
        if not self._full_error:
            environment.pop(FULL_ERROR, None)
        # Hydra escapes interpolations in the overrides of a sweep alone.
        typed = OmegaConf.to_container(hydra_config.overrides, resolve=number is not None)
        assert isinstance(typed, dict)
        return Job(
            run_id=self._run_id if number is None else f"{self._run_id}-{number}",
            run_dir=Path(hydra_config.runtime.output_dir),
            overrides=tuple(typed["task"]),
            environment=environment,
            sweep_dir=None if number is None else Path(hydra_config.sweep.dir).absolute(),
            nursery=None if number is None else self._nursery,
        )
