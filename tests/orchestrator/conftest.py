"""What the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "conversation_trace.jsonl"


@pytest.fixture
def trace_path() -> str:
    """The published conversation trace, kept beside the checkout and not in it."""
    if not TRACE.is_file():
        pytest.skip(f"the published trace is not at {TRACE}")
    return str(TRACE)
