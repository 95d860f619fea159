"""The command of `action=export`, pasted into a shell: it serves, and ends in good order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.real_vllm.kit import environment, launch, prompts
from tests.real_vllm.test_vllm_events import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(1500)]

START_S = 600.0


def completion(port: int, prompt: str) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def serves(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_an_exported_command_serves_stores_and_tells_its_counts_when_it_is_terminated(
    smollm2: Path, tmp_path: Path
) -> None:
    run_dir, disk, port = tmp_path / "run", tmp_path / "fs", free_port()
    done = launch(
        run_dir,
        *("action=export", "engine=vllm", f"engine.model={smollm2}", "parallel=dp1_tp1"),
        *("view=quiet", "tiers=shm_fs", f"tiers.stack.fs.paths=[{disk}]"),
        *("tiers.stack.fs.capacity=256MiB", "region.size=64MiB", "region.blocks_per_chunk=2"),
        *(f"engine.vllm.port={port}", "engine.vllm.max_model_len=2048"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [command] = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    log = tmp_path / "serve.log"
    # From elsewhere and with nothing of the launcher's environment but what a shell has.
    kept = {name: value for name, value in environment().items() if name in ("PATH", "HOME")}
    with open(log, "wb") as output:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=tmp_path,
            env=kept | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        until_s = time.monotonic() + START_S
        while not serves(port):
            assert server.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until_s
            time.sleep(0.2)
        [prompt] = prompts(1)
        answer = completion(port, prompt)
        assert answer["usage"]["completion_tokens"] == 8
    finally:
        # Also when something failed: a vLLM that is killed leaves shared memory of its own.
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=120)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    counted = json.loads((run_dir / "replicas" / "dp0" / "stack.json").read_bytes())
    assert counted["primary"]["stored"] > 0
    assert counted["lower_tiers"]["fs"]["stores"] > 0
    assert not list(Path("/dev/shm").glob("kvquay_*"))
