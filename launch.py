"""`python launch.py`: compose the configuration with Hydra, then let the orchestrator run it."""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C while the imports below run ends the process as it ends any program, not in the middle
    # of somebody's module with a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from orchestrator.compose import register
from orchestrator.job import EXIT_CONFIG, EXIT_OK
from orchestrator.launching import FULL_ERROR, JobEntry, open_console
from orchestrator.overrides import check_overrides, explain
from orchestrator.problems import ConfigProblems, Problem
from orchestrator.rundir import new_run_id
from orchestrator.sweep.sweep import Sweep

CONF = Path(__file__).resolve().parent / "conf"


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
    errors = open_console(stderr=True)

    def refuse(problems: Sequence[Problem]) -> int:
        errors.print(str(ConfigProblems(problems)), soft_wrap=True)
        return EXIT_CONFIG

    if problems := check_overrides(sys.argv[1:], CONF):
        return refuse(problems)

    # Hydra would print its own errors and exit with 1; ours is 2, with the reason in one piece.
    full_error = os.environ.get(FULL_ERROR) == "1"
    os.environ[FULL_ERROR] = "1"
    register()
    run_id = new_run_id()
    OmegaConf.register_new_resolver("kvquay.run_id", lambda: run_id, replace=True)
    sweep = Sweep.asked_for(sys.argv[1:], run_id)
    if sweep is not None:
        sys.argv[1:] = sweep.argv
    entry = JobEntry(run_id, full_error)

    @hydra.main(version_base="1.3", config_path="conf", config_name="config")
    def job(cfg: DictConfig) -> None:
        entry(cfg)

    status: int | None = None
    try:
        job()
    except SystemExit as end:
        if end.code == 1 and not entry.begun:
            return EXIT_CONFIG  # Hydra ends so where it has told what is wrong
        raise
    except BrokenPipeError:
        raise
    except Exception as error:
        if entry.bugs:
            raise
        if full_error or (sweep is not None and sweep.has_begun):
            traceback.print_exc()
        if sweep is None or not sweep.has_begun:
            status = refuse([explain(error)])
    finally:
        entry.close()
        found = None if sweep is None else sweep.finish(open_console(stderr=False))
    if status is not None:
        return status
    worst = max((outcome.exit_status for outcome in entry.outcomes), default=EXIT_OK)
    return worst if found is None else found


if __name__ == "__main__":
    sys.exit(main())
