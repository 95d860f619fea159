"""The object tier passes the suite that every tier passes on real, independent servers."""

from __future__ import annotations

import pytest
from object_servers_kit import GatewayHarness, RgwHarness, SeaweedFsHarness

from backends.testing import TierConformance
from backends.testing.machine import TierMachine, machine_test
from tests.servers.account import Bucket
from tests.servers.fixtures import UseAccount

pytestmark = pytest.mark.multiproc


@pytest.fixture
def on_seaweedfs(seaweedfs_bucket: Bucket, use_account: UseAccount) -> None:
    use_account(seaweedfs_bucket.account)
    SeaweedFsHarness.bucket = seaweedfs_bucket


@pytest.fixture
def on_rgw(rgw_bucket: Bucket, use_account: UseAccount) -> None:
    use_account(rgw_bucket.account)
    RgwHarness.bucket = rgw_bucket


@pytest.fixture
def on_gateway(gateway_bucket: Bucket, use_account: UseAccount) -> None:
    use_account(gateway_bucket.account)
    GatewayHarness.bucket = gateway_bucket


@pytest.mark.usefixtures("on_seaweedfs")
class TestSeaweedFs(TierConformance):
    harness_type = SeaweedFsHarness
    kills = 2


@pytest.mark.usefixtures("on_rgw")
class TestRgw(TierConformance):
    harness_type = RgwHarness
    kills = 2


@pytest.mark.usefixtures("on_gateway")
class TestStoreWithoutConditions(TierConformance):
    harness_type = GatewayHarness
    kills = 2


class SeaweedFsMachine(TierMachine):
    harness_type = SeaweedFsHarness


class FullSeaweedFsMachine(TierMachine):
    harness_type = SeaweedFsHarness
    capacity_blocks = 4


class RgwMachine(TierMachine):
    harness_type = RgwHarness


@pytest.mark.usefixtures("on_seaweedfs")
class TestSeaweedFsMachine(machine_test(SeaweedFsMachine, examples=5)):
    pass


@pytest.mark.usefixtures("on_seaweedfs")
class TestFullSeaweedFsMachine(machine_test(FullSeaweedFsMachine, examples=5)):
    pass


@pytest.mark.usefixtures("on_rgw")
class TestRgwMachine(machine_test(RgwMachine, examples=5)):
    pass
