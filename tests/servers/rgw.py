"""Ceph's S3 gateway, which `.ci/rgw` starts around the tests: a second, independent server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tests.servers.account import Account

ACCOUNT: Final = "KVQUAY_TEST_RGW"
REQUIRE: Final = "KVQUAY_TEST_REQUIRE"
MISSING: Final = (
    f"no Ceph gateway: {ACCOUNT} does not name the file with its endpoint and credentials; run the "
    "tests through .ci/rgw"
)


def rgw_account() -> Account | None:
    """The account that was given to the tests; None where there is no gateway."""
    path = os.environ.get(ACCOUNT)
    if path is None:
        return None
    lines = Path(path).read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line)
    return Account(
        given["AWS_ENDPOINT_URL"], given["AWS_ACCESS_KEY_ID"], given["AWS_SECRET_ACCESS_KEY"]
    )


def is_required(name: str) -> bool:
    """Whether a test that is skipped because it lacks `name` counts as failed."""
    return name in os.environ.get(REQUIRE, "").replace(",", " ").split()
