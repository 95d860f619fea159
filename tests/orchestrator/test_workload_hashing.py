"""Hashes are pure functions: same bytes everywhere, nothing shared between tenants."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.workload.hashing import HASH_BYTES, chain, chain_root, splitter

PROBE = """
from orchestrator.workload.hashing import chain, chain_root, splitter
print(splitter(4)(chain(chain_root("tenant", "trace"), b"abc"))[3].hex())
"""


def test_hashes_stay_what_they_are() -> None:
    root = chain_root("tenant", "trace")
    assert root.hex() == "5177ea4e7464b41d467ed090ddd98b6b0072e8515a4a31e13f1f9f509b943ec1"
    assert (
        chain(root, b"abc").hex()
        == "56d0e5784c63bf853aa420d7dd7bc29e543c12482a5ffcfc88e8e8d030247392"
    )
    assert (
        splitter(4)(chain(root, b"abc"))[3].hex()
        == "1621742018be3e58b927f90cb23c5856e713dfb72866653feefe768e6e9cee24"
    )


def test_hashes_do_not_depend_on_the_process() -> None:
    found = set()
    for seed in ("0", "1", "random"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        out = subprocess.run(
            [sys.executable, "-c", PROBE],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found.add(out.stdout.strip())
    assert found == {splitter(4)(chain(chain_root("tenant", "trace"), b"abc"))[3].hex()}


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_roots_differ_unless_salt_and_domain_are_equal(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    assert (chain_root(*one) == chain_root(*other)) == (one == other)


def test_salt_and_domain_are_not_read_as_one_text() -> None:
    assert chain_root("ab", "c") != chain_root("a", "bc")


@pytest.mark.parametrize("parts", [1, 2, 32, 512])
def test_parts_are_distinct_and_of_full_length(parts: int) -> None:
    made = splitter(parts)(b"x" * HASH_BYTES)
    assert len(set(made)) == len(made) == parts
    assert {len(part) for part in made} == {HASH_BYTES}
    assert not set(made) & set(splitter(parts)(b"y" * HASH_BYTES))
