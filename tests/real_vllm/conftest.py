"""Fixtures of the tests that need a real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers.rgw import is_required


def pytest_configure() -> None:
    """Where vLLM is required, what engines are forked from is made while tests are collected."""
    if is_required("vllm"):
        from tests.real_vllm.kit import forkserver

        forkserver()


def pytest_collection_modifyitems() -> None:
    """Where vLLM is required, a test that would be skipped for want of it has failed."""
    if is_required("vllm"):
        import vllm  # noqa: F401


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that needs no weights: `load_format=dummy`."""
    from tests.real_vllm.kit import save_tiny

    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct."""
    from tests.real_vllm.kit import save_smollm2

    return save_smollm2(tmp_path_factory.mktemp("smollm2"))
