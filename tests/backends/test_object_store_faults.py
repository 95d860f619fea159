"""The object tier on real servers that are shared, refuse, fail on the way, stop and come back."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from object_kit import open_tier, path_of
from object_servers_kit import ServerBench, blocks_of, server_settings

from backends.errors import TierError
from backends.testing import FINGERPRINT, make_keys
from backends.testing.peer import Peer, PeerSetup
from backends.tier.base import Lookup, Outcome
from backends.tier.object.doctor import leftovers
from tests.servers.account import Account, Bucket
from tests.servers.credentials import CredentialService
from tests.servers.fixtures import UseAccount
from tests.servers.gateway import Gateway
from tests.servers.proxy import Fault, Kind, Proxy
from tests.servers.seaweedfs import SeaweedFs

pytestmark = pytest.mark.multiproc

DONE, FAILED, MISSING, CORRUPT = Outcome.DONE, Outcome.FAILED, Outcome.MISSING, Outcome.CORRUPT
QUICK = {
    "connect_timeout_s": 30.0,
    "read_timeout_s": 30.0,
    "retry_s": 0.01,
    "breaker_s": 0.1,
    "breaker_most_s": 0.2,
}
# For who waits for a time-out. A server on a busy machine may run into it at any request, too.
IMPATIENT = {
    **QUICK,
    "connect_timeout_s": 0.5,
    "read_timeout_s": 0.5,
    "request_timeout_s": 2.0,
}
MIB = 1 << 20


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return f"faults-{abs(hash(request.node.nodeid)):x}-{os.getpid()}-{time.time_ns()}"


def through(bucket: Bucket, proxy: Proxy) -> Bucket:
    """The same bucket by way of the proxy, for the tier; tests look at it directly."""
    return Bucket(bucket.account.at(proxy.endpoint), bucket.name, bucket.client)


@pytest.fixture
def proxied(proxy: Proxy, seaweedfs_bucket: Bucket, use_account: UseAccount) -> Iterator[Bucket]:
    use_account(seaweedfs_bucket.account)
    yield through(seaweedfs_bucket, proxy)
    proxy.mend()


def _use(bench: ServerBench) -> None:
    """Until the store has been reached."""
    key = make_keys("the first", 1)
    bench.until(lambda: bench.store(key) == [DONE], "the store is not reached")


def store_as_three_replicas(bucket: Bucket, prefix: str) -> None:
    """Three replicas store the same keys at the same time, and each loads them."""
    with ExitStack() as held:
        benches = [
            held.enter_context(
                ServerBench(bucket, prefix, replica=index, replicas=3, stagger_s=0.0)
            )
            for index in range(3)
        ]
        keys = make_keys("the same", 8)
        for submit in (ServerBench.submit_store, ServerBench.submit_load):
            jobs = [(bench, submit(bench, keys)) for bench in benches]
            for bench, job in jobs:
                assert bench.outcomes(job) == [DONE] * 8
        assert all(bench.count("corrupt") == 0 for bench in benches)


@pytest.mark.parametrize("server", ["seaweedfs", "rgw"])
def test_three_replicas_that_store_the_same_keys_upload_each_once(
    server: str, request: pytest.FixtureRequest, use_account: UseAccount, prefix: str
) -> None:
    bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
    use_account(bucket.account)
    with Proxy(bucket.account.endpoint) as proxy:
        store_as_three_replicas(through(bucket, proxy), prefix)
        uploads = proxy.count("PUT", contains=".kvb", status=200)
        assert uploads == 8
    assert len(blocks_of(bucket, prefix)) == 8


def test_a_store_without_conditions_is_found_out_and_a_second_upload_harms_nothing(
    gateway: Gateway, gateway_bucket: Bucket, use_account: UseAccount, prefix: str
) -> None:
    use_account(gateway.account)
    with ServerBench(gateway_bucket, prefix) as bench:
        assert "no conditional writes" in "\n".join(bench.object.describe())
    with Proxy(gateway.account.endpoint) as proxy:
        store_as_three_replicas(through(gateway_bucket, proxy), prefix)
        assert 8 <= proxy.count("PUT", contains=".kvb", status=200) <= 24
    assert len(blocks_of(gateway_bucket, prefix)) == 8
    with pytest.raises(TierError, match="conditional is on"):
        ServerBench(gateway_bucket, prefix, conditional="on")
    with pytest.raises(TierError, match="capacity to unbounded"):
        ServerBench(gateway_bucket, prefix, capacity=MIB)


class TestBigBlocks:
    SIZES: ClassVar[dict[str, Any]] = {"rows": 4, "row_bytes": 12 * MIB}
    PARTS: ClassVar[dict[str, Any]] = {
        "multipart_threshold": 5 * MIB,
        "multipart_part": 5 * MIB,
        "retry_s": 0.01,
    }

    def test_are_stored_in_parts(self, proxied: Bucket, proxy: Proxy, prefix: str) -> None:
        keys = make_keys("big", 2)
        with ServerBench(proxied, prefix, **self.SIZES, **self.PARTS) as bench:
            assert bench.store(keys) == [DONE] * 2
            assert bench.load(keys) == [DONE] * 2
            assert proxy.count("PUT", contains="partNumber=", status=200) == 6
            assert bench.store(keys) == [DONE] * 2
            assert proxy.count("PUT", contains="partNumber=", status=200) == 6
        assert list(blocks_of(proxied, prefix).values()) == [12 * MIB] * 2
        assert self.unfinished(proxied, prefix) == []

    def test_leave_nothing_where_a_part_is_refused(
        self, proxied: Bucket, proxy: Proxy, prefix: str
    ) -> None:
        keys = make_keys("refused", 1)
        with ServerBench(proxied, prefix, **self.SIZES, **self.PARTS, retries=1) as bench:
            proxy.fail(Fault(Kind.STATUS, methods=("PUT",), contains="partNumber=2", status=500))
            assert bench.store(keys) == [FAILED]
            assert proxy.hits() > 0
            proxy.mend()
            assert blocks_of(proxied, prefix) == {}
            assert self.unfinished(proxied, prefix) == []
            assert bench.store(keys) == [DONE]
            assert bench.load(keys) == [DONE]

    @pytest.mark.parametrize("server", ["seaweedfs", "rgw"])
    def test_that_a_dead_writer_left_unfinished_are_listed(
        self, server: str, request: pytest.FixtureRequest, use_account: UseAccount, prefix: str
    ) -> None:
        bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
        use_account(bucket.account)
        keys = make_keys("left", 1)
        with Proxy(bucket.account.endpoint) as proxy:
            proxy.fail(Fault(Kind.HANG, methods=("PUT",), contains="partNumber=2"))
            settings = server_settings(through(bucket, proxy), prefix, **self.PARTS)
            opener = partial(open_tier, settings, place="")
            setup = PeerSetup(opener, **self.SIZES, fingerprint=FINGERPRINT, patience_s=30.0)
            with Peer(setup) as peer:
                peer.ready().begin("store", keys)
                until_s = time.monotonic() + 30.0
                while not proxy.hits():
                    assert time.monotonic() < until_s, "no second part is uploaded"
                    time.sleep(0.01)
                peer.kill()
        [left] = leftovers(server_settings(bucket, prefix))
        assert left.name == f"{prefix}/{path_of(FINGERPRINT, keys[0])}"
        assert self.unfinished(bucket, prefix) == [left.name]
        assert leftovers(server_settings(bucket, f"{prefix}-another")) == []
        assert blocks_of(bucket, prefix) == {}

    def unfinished(self, bucket: Bucket, prefix: str) -> list[str]:
        return [name for name in bucket.uploads() if name.startswith(prefix)]


class TestRefusals:
    """One clear error at the start, which names the fix and no secret."""

    def refused(self, bucket: Bucket, prefix: str, *secrets: str) -> str:
        with pytest.raises(TierError) as caught:
            ServerBench(bucket, prefix)
        for secret in secrets:
            assert secret not in str(caught.value) + repr(caught.value.__context__)
        return str(caught.value)

    @pytest.mark.parametrize("server", ["seaweedfs", "rgw"])
    def test_unknown_credentials(
        self, server: str, request: pytest.FixtureRequest, use_account: UseAccount, prefix: str
    ) -> None:
        bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
        wrong = Account.fresh(bucket.account.endpoint)
        use_account(wrong)
        told = self.refused(bucket, prefix, wrong.secret_key, wrong.access_key)
        assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in told
        assert "access denied" in told

    @pytest.mark.parametrize("server", ["seaweedfs", "rgw"])
    def test_a_wrong_secret(
        self, server: str, request: pytest.FixtureRequest, use_account: UseAccount, prefix: str
    ) -> None:
        bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
        use_account(bucket.account)
        os.environ["AWS_SECRET_ACCESS_KEY"] = "not-the-secret"
        told = self.refused(bucket, prefix, bucket.account.secret_key, "not-the-secret")
        assert "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in told

    def test_credentials_that_may_only_read(
        self,
        seaweedfs: SeaweedFs,
        seaweedfs_bucket: Bucket,
        use_account: UseAccount,
        prefix: str,
    ) -> None:
        use_account(seaweedfs.reader)
        told = self.refused(seaweedfs_bucket, prefix, seaweedfs.reader.secret_key)
        assert "s3:PutObject" in told

    @pytest.mark.parametrize("server", ["seaweedfs", "rgw"])
    def test_a_bucket_that_is_not_there(
        self, server: str, request: pytest.FixtureRequest, use_account: UseAccount, prefix: str
    ) -> None:
        bucket: Bucket = request.getfixturevalue(f"{server}_bucket")
        use_account(bucket.account)
        nowhere = Bucket(bucket.account, "nobody-made-this", bucket.client)
        assert "no bucket 'nobody-made-this'" in self.refused(nowhere, prefix)


def test_credentials_that_expire_are_renewed_while_the_tier_is_open(
    seaweedfs: SeaweedFs,
    seaweedfs_bucket: Bucket,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    prefix: str,
) -> None:
    keys, fresh = make_keys("before", 2), make_keys("behind", 2)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with CredentialService(tmp_path, seaweedfs.account) as service:
        for name, value in service.environment().items():
            monkeypatch.setenv(name, value)
        with ServerBench(seaweedfs_bucket, prefix, **QUICK, retries=0) as bench:
            assert bench.store(keys) == [DONE] * 2
            service.account = seaweedfs.reader
            some = (make_keys(f"meanwhile {number}", 1) for number in itertools.count())
            bench.until(lambda: bench.store(next(some)) == [FAILED], "a reader can write")
            assert bench.count("denied") > 0
            bench.until(lambda: bench.load(keys) == [DONE] * 2, "a reader can read no more")
            service.account = seaweedfs.account
            bench.until(lambda: bench.store(fresh) == [DONE] * 2, "a writer cannot write again")
        assert service.asked > 2


class TestTls:
    def test_an_authority_of_ones_own_is_trusted_where_it_is_given(
        self, tls_gateway: Gateway, use_account: UseAccount, prefix: str
    ) -> None:
        use_account(tls_gateway.account)
        keys = make_keys("encrypted", 2)
        bucket, given = tls_gateway.account.make_bucket(), tls_gateway.account.ca_bundle
        with ServerBench(bucket, prefix, allow_http=False, ca_bundle=given) as bench:
            assert bench.store(keys) == [DONE] * 2
            assert bench.load(keys) == [DONE] * 2
            direct = bench.object._client._direct
            assert direct is not None
            assert direct._idle, "no load went over a connection of our own"

    def test_a_server_that_nobody_vouches_for_is_sent_nothing(
        self, tls_gateway: Gateway, use_account: UseAccount, prefix: str
    ) -> None:
        use_account(tls_gateway.account)
        bucket = tls_gateway.account.make_bucket()
        with pytest.raises(TierError, match=r"certificate .* ca_bundle"):
            ServerBench(bucket, prefix, allow_http=False)
        assert bucket.sizes() == {}


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
        (Fault(Kind.STATUS, status=503), "throttled"),
        (Fault(Kind.STATUS, status=429), "throttled"),
        (Fault(Kind.STATUS, status=500), "retries"),
        (Fault(Kind.RESET), "retries"),
        (Fault(Kind.LOST_ANSWER), "retries"),
        (Fault(Kind.HANG), "timeouts"),
        (Fault(Kind.CUT, methods=("GET",)), "retries"),
    ],
    ids=lambda value: f"{value.kind.name}_{value.status}" if isinstance(value, Fault) else value,
)
def test_a_fault_that_passes_costs_a_retry_and_no_block(
    fault: Fault, counted: str, proxied: Bucket, proxy: Proxy, prefix: str
) -> None:
    keys = make_keys("passing", 4)
    settings = IMPATIENT if fault.kind is Kind.HANG else QUICK
    with ServerBench(proxied, prefix, **settings, breaker_failures=50) as bench:
        _use(bench)
        if fault.methods is None:
            proxy.fail(fault, times=2)
        assert bench.store(keys) == [DONE] * 4
        proxy.fail(fault, times=2)
        assert bench.load(keys) == [DONE] * 4
        assert bench.count(counted) >= 2
        assert bench.count("retries") >= 2
        assert bench.count("breaker_opened") == 0
        assert bench.count("corrupt") == 0
    assert proxy.hits() == (2 if fault.methods else 4)


def test_a_bit_that_flips_on_the_way_is_never_served(
    proxied: Bucket, proxy: Proxy, prefix: str
) -> None:
    keys = make_keys("flipping", 4)
    with ServerBench(proxied, prefix, **QUICK) as bench:
        assert bench.store(keys) == [DONE] * 4
        proxy.fail(Fault(Kind.FLIP, methods=("GET",), contains=".kvb"), times=2)
        outcomes = bench.load(keys)
        assert outcomes.count(DONE) == 2
        assert outcomes.count(CORRUPT) == bench.count("corrupt") == 2
        assert bench.store(keys) == [DONE] * 4
        assert bench.load(keys) == [DONE] * 4


def test_a_bit_that_flips_on_its_way_into_the_store_is_found_by_the_load(
    proxied: Bucket, proxy: Proxy, prefix: str
) -> None:
    keys = make_keys("flipped", 2)
    with ServerBench(proxied, prefix, **QUICK) as bench:
        proxy.fail(Fault(Kind.FLIP_UPLOAD, methods=("PUT",), contains=".kvb"), times=1)
        assert set(bench.store(keys)) <= {DONE, FAILED}
        outcomes = bench.load(keys)
        assert outcomes.count(DONE) == 1
        assert set(outcomes) <= {DONE, CORRUPT, MISSING}
        assert bench.store(keys) == [DONE] * 2
        assert bench.load(keys) == [DONE] * 2


def test_a_slow_store_keeps_nobody_waiting(proxied: Bucket, proxy: Proxy, prefix: str) -> None:
    """Bytes come all the time, so no time-out ends it: the deadline does."""
    keys = make_keys("slow", 2)
    with ServerBench(proxied, prefix, rows=8, row_bytes=MIB, **QUICK) as bench:
        assert bench.store(keys) == [DONE] * 2
        with proxy.failing(Fault(Kind.SLOW, methods=("GET",), contains=".kvb", seconds=0.05)):
            job = bench.submit_load(keys, time.monotonic() + 0.1)
            assert bench.lookup(keys) == [Lookup.HIT] * 2
            assert set(bench.outcomes(job)) <= {Outcome.LATE, FAILED}
        assert bench.load(keys) == [DONE] * 2


class TestOutages:
    def test_a_sick_store_is_left_alone_and_comes_back_by_itself(
        self, proxied: Bucket, proxy: Proxy, prefix: str
    ) -> None:
        keys = make_keys("sick", 4)
        with ServerBench(proxied, prefix, **QUICK, retries=1, breaker_failures=3) as bench:
            assert bench.store(keys) == [DONE] * 4
            proxy.fail(Fault(Kind.STATUS, status=503))
            while bench.lookup(keys) != [Lookup.MISS] * 4:
                assert set(bench.load(keys)) <= {FAILED, Outcome.SHED}
            assert bench.count("breaker_opened") > 0
            asked = len(proxy.exchanges)
            for _ in range(100):
                bench.lookup(keys)
                bench.load(keys)
            # At most what the breaker lets through when it tries again.
            assert len(proxy.exchanges) - asked < 100
            proxy.mend()
            bench.until(lambda: bench.load(keys) == [DONE] * 4, "the store stays out")
            assert bench.lookup(keys) == [Lookup.HIT] * 4

    def test_a_server_that_stops_and_one_that_dies_are_missed_and_found_again(
        self, seaweedfs: SeaweedFs, seaweedfs_bucket: Bucket, use_account: UseAccount, prefix: str
    ) -> None:
        use_account(seaweedfs.account)
        keys, fresh = make_keys("kept", 4), make_keys("fresh", 4)
        with ServerBench(seaweedfs_bucket, prefix, **IMPATIENT, retries=1) as bench:
            bench.until(lambda: bench.store(keys) == [DONE] * 4, "nothing can be stored")
            for take_down, bring_back in (
                (seaweedfs.pause, seaweedfs.resume),
                (seaweedfs.kill, seaweedfs.restart),
            ):
                take_down()
                try:
                    assert DONE not in bench.load(keys)
                    assert DONE not in bench.store(fresh)
                finally:
                    bring_back()
                bench.until(lambda: bench.load(keys) == [DONE] * 4, "the server is not found again")
            assert bench.count("timeouts") > 0
            bench.until(lambda: bench.store(fresh) == [DONE] * 4, "nothing can be stored any more")
            bench.until(lambda: bench.load(fresh) == [DONE] * 4, "what is new cannot be loaded")
            assert bench.count("corrupt") == 0

    def test_a_store_that_is_down_at_the_start_is_used_when_it_is_up(
        self, proxied: Bucket, proxy: Proxy, prefix: str
    ) -> None:
        keys = make_keys("later", 4)
        proxy.fail(Fault(Kind.RESET))
        with ServerBench(proxied, prefix, **QUICK) as bench:
            assert bench.lookup(keys) == [Lookup.MISS] * 4
            assert DONE not in bench.store(keys)
            proxy.mend()
            bench.until(lambda: bench.store(keys) == [DONE] * 4, "the store is not found")
            assert bench.load(keys) == [DONE] * 4

    def test_closing_does_not_wait_for_a_store_that_hangs(
        self, proxied: Bucket, proxy: Proxy, prefix: str
    ) -> None:
        bench = ServerBench(proxied, prefix, read_timeout_s=60.0, close_timeout_s=0.5)
        keys = make_keys("hanging", 4)
        assert bench.store(keys) == [DONE] * 4
        proxy.fail(Fault(Kind.HANG))
        bench.submit_load(keys)
        closed = threading.Thread(target=bench.tier.close)
        closed.start()
        closed.join(20.0)
        in_time = not closed.is_alive()
        proxy.mend()
        closed.join()
        assert in_time, "close waits for the store"
