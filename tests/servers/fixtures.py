"""Fixtures of everything that needs a server. Each is started once, when the first test asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.servers.account import Account, Bucket
from tests.servers.gateway import Gateway
from tests.servers.proxy import Proxy
from tests.servers.rgw import MISSING, is_required, rgw_account
from tests.servers.seaweedfs import SeaweedFs

UseAccount = Callable[[Account], None]


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[SeaweedFs]:
    with SeaweedFs() as server:
        server.launch()
        yield server


@pytest.fixture
def seaweedfs(seaweedfs_server: SeaweedFs) -> Iterator[SeaweedFs]:
    """A test may pause or kill it: the next one finds it running."""
    yield seaweedfs_server
    if seaweedfs_server.running:
        seaweedfs_server.resume()
    else:
        seaweedfs_server.kill()
        seaweedfs_server.restart()


@pytest.fixture(scope="session")
def seaweedfs_bucket(seaweedfs_server: SeaweedFs) -> Bucket:
    """One bucket for all tests, because it costs volumes; each has a prefix of its own in it."""
    return seaweedfs_server.account.make_bucket()


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    """The store that does not know conditional writes."""
    with Gateway() as server:
        server.launch()
        yield server


@pytest.fixture(scope="session")
def tls_gateway() -> Iterator[Gateway]:
    """A server whose certificate nobody trusts who has not been given `account.ca_bundle`."""
    with Gateway(tls=True) as server:
        server.launch()
        yield server


@pytest.fixture(scope="session")
def gateway_bucket(gateway: Gateway) -> Bucket:
    return gateway.account.make_bucket()


@pytest.fixture(scope="session")
def rgw() -> Account:
    """Skips where there is no gateway, unless KVQUAY_TEST_REQUIRE says that there has to be one."""
    account = rgw_account()
    if account is None:
        if is_required("rgw"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    return account


@pytest.fixture(scope="session")
def rgw_bucket(rgw: Account) -> Bucket:
    return rgw.make_bucket()


@pytest.fixture
def use_account(monkeypatch: pytest.MonkeyPatch) -> UseAccount:
    """Gives an account's credentials to all that this test does, and to processes it starts."""

    def use(account: Account) -> None:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
            monkeypatch.delenv(name, raising=False)
        for name, value in account.environment().items():
            monkeypatch.setenv(name, value)

    return use


@pytest.fixture
def proxy(seaweedfs: SeaweedFs) -> Iterator[Proxy]:
    """Before SeaweedFS."""
    with Proxy(seaweedfs.account.endpoint) as proxy:
        yield proxy
