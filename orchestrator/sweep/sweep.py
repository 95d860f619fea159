"""A sweep from the launcher's side: where it is written, what it was to do, how it ended.

Hydra says nothing of that in the end: after a job that raised it calls nobody, and a launcher's
jobs run elsewhere. So the directory is settled before Hydra starts, and what is told afterwards is
made of the files that the jobs left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from rich.console import Console

from orchestrator import __version__
from orchestrator.html.sweep_page import sweep_page
from orchestrator.job import reproduce, say
from orchestrator.plan import write_atomic
from orchestrator.problems import redact
from orchestrator.render import print_sweep
from orchestrator.sweep.compare import OBJECTIVES, Comparison, compare
from orchestrator.sweep.record import Records

_SWEEP_DIR: Final = "hydra.sweep.dir"


class Sweep:
    """One sweep. `argv` is the command line with its directory fixed."""

    def __init__(self, argv: Sequence[str], run_id: str) -> None:
        parsed = get_args_parser().parse_args(list(argv))
        overrides = OverridesParser.create().parse_overrides(parsed.overrides)
        self._typed = tuple(parsed.overrides)
        given = [o for o in overrides if o.key_or_group == _SWEEP_DIR]
        self._run_id = run_id
        self._directory = Path(_resolved(given[-1]) if given else f"multirun/{run_id}")
        self._records = Records(self._directory, run_id)
        kept = [text for text in argv if text.lstrip("+").partition("=")[0] != _SWEEP_DIR]
        # Interpolations in it would have another value in every process.
        self.argv = [*kept, f"{_SWEEP_DIR}={_quoted(str(self._directory))}"]
        self._planned = _planned(overrides)
        self._began_s = time.time()

    @classmethod
    def asked_for(cls, argv: Sequence[str], run_id: str) -> Sweep | None:
        """None where the command line does not ask for a sweep."""
        parsed = get_args_parser().parse_args(list(argv))
        if parsed.help or parsed.hydra_help or parsed.cfg or parsed.info:
            return None
        by_mode = any(o.replace(" ", "").upper() == "HYDRA.MODE=MULTIRUN" for o in parsed.overrides)
        return cls(argv, run_id) if parsed.multirun or by_mode else None

    @property
    def has_begun(self) -> bool:
        """Whether any job has, wherever it ran."""
        return bool(self._records.read())

    def finish(self, console: Console) -> int | None:
        """Show and write what all jobs came to; the worst exit status, None if none has begun."""
        records = self._records.read()
        if not records:
            return None
        comparison = compare(records, self._planned)
        print_sweep(console, comparison)
        report = self._report(comparison)
        path = self._directory / "sweep.json"
        write_atomic(path, msgspec.json.format(msgspec.json.encode(report), indent=2))
        page = self._directory / "sweep.html"
        write_atomic(page, sweep_page(report, comparison, self._directory))
        say(console, f"sweep:  {page}")
        say(console, f"again:  {report['reproduce']}")
        not_run = any(not job.well for job in comparison.jobs)
        return max([int(not_run), *(record.exit_status for record in records)])

    def _report(self, comparison: Comparison) -> dict[str, Any]:
        return {
            "format": 1,
            "version": __version__,
            "sweep_id": self._run_id,
            "sweep_dir": str(self._directory.absolute()),
            "started_s": self._began_s,
            "duration_s": time.time() - self._began_s,
            "reproduce": redact(reproduce(("-m", *self._typed))),
            "common": list(comparison.common),
            "axes": [asdict(axis) for axis in comparison.axes],
            "failed": len(comparison.failed),
            "jobs": [asdict(job) for job in comparison.jobs],
            "best": {
                objective.key: None if best is None else best.number
                for objective in OBJECTIVES
                for best in [comparison.best(objective)]
            },
            "pareto": sorted(job.number for job in comparison.jobs if job.pareto),
        }


def _resolved(override: Override) -> str:
    """A directory as it is meant now, such as one with `${now:%H-%M}` in it."""
    value = override.value()
    node = OmegaConf.create({"directory": str(value)})
    return str(node.directory)


def _quoted(path: str) -> str:
    escaped = path.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _planned(overrides: Sequence[Override]) -> list[list[str]]:
    """What Hydra's own sweeper makes of a command line; empty where that is another one's to say,
    or where Hydra will say what is wrong with it."""
    task = [o for o in overrides if not o.key_or_group.startswith("hydra")]
    if any(o.key_or_group in ("hydra/sweeper", "hydra.sweeper.params") for o in overrides):
        return []
    try:
        [jobs] = BasicSweeper.split_arguments(task, None)
    except Exception:  # glob() needs Hydra's own view of the options
        return []
    return jobs
