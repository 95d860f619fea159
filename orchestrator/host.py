"""On what a run was made, in words and numbers that a report can carry."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from backends import machine
from orchestrator import __version__

_PACKAGES: Final = ("torch", "hydra-core", "numpy", "obstore")
_CPUINFO: Final = Path("/proc/cpuinfo")


def host_facts() -> dict[str, Any]:
    """This machine and what is installed on it; sizes in bytes. Loads none of the packages."""
    memory = machine.memory_limits()
    limit = min(memory, key=lambda found: found.limit_bytes)
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory[0].limit_bytes,
        "memory_limit_bytes": limit.limit_bytes,
        "numa_nodes": len(machine.numa_nodes()),
        "cuda_devices": machine.cuda_device_count(),
        "python": platform.python_version(),
        "kvquay": __version__,
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    """Empty where the kernel does not name it."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "")
