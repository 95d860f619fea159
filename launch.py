"""`python launch.py`: compose the configuration with Hydra, then let the orchestrator run it."""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C while the imports below run ends the process as it ends any program, not in the middle
    # of somebody's module with a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from orchestrator import app
from orchestrator.compose import register
from orchestrator.job import EXIT_CONFIG, EXIT_OK, Job, Outcome
from orchestrator.overrides import check_overrides, explain
from orchestrator.problems import ConfigProblems, Problem
from orchestrator.rundir import new_run_id
from orchestrator.sweep import Sweep

FILE_WIDTH = 200
CONF = Path(__file__).resolve().parent / "conf"


def _console(*, stderr: bool) -> Console:
    """As wide as the terminal; a file or a pipe gets lines that are not cut.

    What is shown may hold anything that a user typed, so nothing in it is markup.
    """
    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


def _typed_overrides(hydra_config: HydraConf, sweeping: bool) -> tuple[str, ...]:
    """Overrides as a user types them. Hydra escapes interpolations in those of a sweep alone."""
    node = OmegaConf.to_container(hydra_config.overrides, resolve=sweeping)
    assert isinstance(node, dict)
    return tuple(node["task"])


def main() -> int:
    """Exit status: see `app`, and 128 + n where signal n ended it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.raiseExceptions = False  # a log that nobody reads is no reason for a traceback
    try:
        try:
            return _main()
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 128 + signal.SIGINT
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has had enough of it; the interpreter is not to try again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _main() -> int:
    console, errors = _console(stderr=False), _console(stderr=True)
    environment = dict(os.environ)

    def refuse(problems: Sequence[Problem]) -> int:
        errors.print(str(ConfigProblems(problems)), soft_wrap=True)
        return EXIT_CONFIG

    if problems := check_overrides(sys.argv[1:], CONF):
        return refuse(problems)

    # Hydra would print its own errors and exit with 1; ours is 2, with the reason in one piece.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register()
    run_id = new_run_id()
    OmegaConf.register_new_resolver("kvquay.run_id", lambda: run_id, replace=True)
    begun: list[Job] = []
    outcomes: list[Outcome] = []
    bugs: list[Exception] = []
    sweep = Sweep()

    @hydra.main(version_base="1.3", config_path="conf", config_name="config")
    def job(cfg: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        sweeping = hydra_config.mode == RunMode.MULTIRUN
        number = int(hydra_config.job.num) if sweeping else 0
        description = Job(
            run_id=f"{run_id}-{number}" if sweeping else run_id,
            run_dir=Path(hydra_config.runtime.output_dir),
            overrides=_typed_overrides(hydra_config, sweeping),
            environment=environment,
        )
        begun.append(description)
        try:
            outcome = app.run(cfg, description, console, errors)
        except OSError:
            raise
        except Exception as error:
            bugs.append(error)
            raise
        outcomes.append(outcome)
        if sweeping:
            sweep.add(number, description, outcome)
        if outcome.signal is not None:
            # Not an Exception: it must end a sweep as well.
            raise SystemExit(128 + outcome.signal)

    try:
        job()
    except SystemExit as end:
        if end.code == 1 and not begun:
            return EXIT_CONFIG  # Hydra ends so where it has told what is wrong
        raise
    except BrokenPipeError:
        raise
    except Exception as error:
        if bugs:
            raise
        if environment.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        return refuse([explain(error)])
    finally:
        sweep.show(console)
    return max((outcome.exit_status for outcome in outcomes), default=EXIT_OK)


if __name__ == "__main__":
    sys.exit(main())
