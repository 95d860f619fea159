"""`python launch.py`: compose the configuration with Hydra, then let the orchestrator run it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from orchestrator import app
from orchestrator.compose import register
from orchestrator.overrides import check_overrides
from orchestrator.problems import ConfigProblems
from orchestrator.rundir import new_run_id
from orchestrator.sweep import Sweep

FILE_WIDTH = 200
CONF = Path(__file__).resolve().parent / "conf"


def _console(*, stderr: bool) -> Console:
    """As wide as the terminal; a file or a pipe gets lines that are not cut."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=FILE_WIDTH)


def main() -> int:
    console, errors = _console(stderr=False), _console(stderr=True)
    environment = dict(os.environ)
    problems = check_overrides(sys.argv[1:], CONF)
    if problems:
        errors.print(str(ConfigProblems(problems)), markup=False, highlight=False, soft_wrap=True)
        return app.EXIT_CONFIG

    # Hydra would print its own errors and exit with 1; ours is 2, with the reason in one piece.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register()
    run_id = new_run_id()
    OmegaConf.register_new_resolver("kvquay.run_id", lambda: run_id, replace=True)
    outcomes: list[app.Outcome] = []
    sweep = Sweep()

    @hydra.main(version_base="1.3", config_path="conf", config_name="config")
    def job(cfg: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        sweeping = hydra_config.mode == RunMode.MULTIRUN
        number = int(hydra_config.job.num) if sweeping else 0
        description = app.Job(
            run_id=f"{run_id}-{number}" if sweeping else run_id,
            run_dir=Path(hydra_config.runtime.output_dir),
            overrides=tuple(hydra_config.overrides.task),
            environment=environment,
        )
        outcome = app.run(cfg, description, console, errors)
        outcomes.append(outcome)
        if sweeping:
            sweep.add(number, description, outcome)
        if outcome.signal is not None:
            # Not an Exception: it must end a sweep as well.
            raise SystemExit(128 + outcome.signal)

    try:
        job()
    except (HydraException, OmegaConfBaseException) as error:
        errors.print(f"the configuration is bad: {error}", markup=False, soft_wrap=True)
        return app.EXIT_CONFIG
    except KeyboardInterrupt:
        errors.print("interrupted")
        return 128 + signal.SIGINT
    finally:
        sweep.show(console)
    return max((outcome.exit_status for outcome in outcomes), default=app.EXIT_OK)


if __name__ == "__main__":
    sys.exit(main())
