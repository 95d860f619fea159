"""A store that fails in all the ways that stores fail: nobody waits, nothing wrong is served, and
it is used again when it is well."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from object_http import BUCKET, FaultyS3
from object_kit import ROW_BYTES, HookedClient, make_settings

from backends.block import BlockKey
from backends.errors import TierError
from backends.testing.bench import TierBench
from backends.testing.rows import RowBuffer, make_context, make_keys
from backends.tier.base import Lookup, Outcome
from backends.tier.object import faults
from backends.tier.object.client import ObjectClient
from backends.tier.object.faults import Sick, classify
from backends.tier.object.tier import ObjectTier

DONE, FAILED, LATE, SHED = Outcome.DONE, Outcome.FAILED, Outcome.LATE, Outcome.SHED
ACCESS, SECRET, TOKEN = "AKIAEXAMPLE", "verysecretword", "sessiontokenword"
PATIENCE_S = 40.0
# A machine that is busy answers late: only who waits for a time-out may have a short one.
QUICK = {
    "retry_s": 0.01,
    "retry_most_s": 0.02,
    "breaker_s": 0.05,
    "breaker_most_s": 0.2,
    "read_timeout_s": 30.0,
    "connect_timeout_s": 30.0,
    "rescan_s": 0.0,
    "allow_http": True,
    "region": "us-east-1",
}


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)


@pytest.fixture
def server() -> Iterator[FaultyS3]:
    server = FaultyS3()
    yield server
    server.close()


OpenBench = Callable[..., TierBench]


@pytest.fixture
def open_bench(server: FaultyS3) -> Iterator[OpenBench]:
    benches: list[TierBench] = []

    def open_bench(**changes: Any) -> TierBench:
        given = {"endpoint": server.endpoint, **QUICK, **changes}
        settings = make_settings(f"s3://{BUCKET}/pre", **given)
        rows = RowBuffer(32, ROW_BYTES)
        benches.append(TierBench(ObjectTier(make_context(rows), settings), rows, PATIENCE_S))
        return benches[-1]

    yield open_bench
    server.fault = lambda *_: None
    server.released.set()
    for bench in benches:
        bench.close()


def _blocks_only(fault: Any) -> Callable[..., Any]:
    return lambda method, key, query, headers: fault if key.endswith(".kvb") else None


def _stored(bench: TierBench, keys: tuple[BlockKey, ...]) -> None:
    bench.until(lambda: bench.store(keys) == [DONE] * len(keys), "nothing can be stored")


def _again(bench: TierBench, keys: tuple[BlockKey, ...]) -> None:
    """It comes back by itself, to loads and to stores."""
    bench.until(
        lambda: bench.load(keys) == [DONE] * len(keys) and bench.lookup(keys)[0] is Lookup.HIT,
        "loads never come back",
    )
    new = make_keys("again", 2)
    bench.until(lambda: bench.store(new) == [DONE] * 2, "stores never come back")


def test_blocks_come_back_over_http(open_bench: OpenBench) -> None:
    bench, keys = open_bench(), make_keys("plain", 8)
    assert bench.store(keys) == [DONE] * 8
    assert bench.load(keys) == [DONE] * 8


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_passes_is_tried_again(status: int, open_bench: OpenBench, server: FaultyS3) -> None:
    bench, keys = open_bench(breaker_failures=50), make_keys("passing", 4)
    left = {"PUT": 2, "GET": 2}

    def fault(method: str, key: str, *_: Any) -> Any:
        if key.endswith(".kvb") and left.get(method, 0):
            left[method] -= 1
            return status, "SlowDown"
        return None

    server.fault = fault
    assert bench.store(keys) == [DONE] * 4
    assert bench.load(keys) == [DONE] * 4
    counters = bench.tier.counters()
    assert counters["retries"] == 4
    assert counters["throttled"] == (4 if status in (429, 503) else 0)
    assert counters["stored"] == 4


def test_a_put_whose_answer_was_lost_is_stored_once(
    open_bench: OpenBench, server: FaultyS3
) -> None:
    bench, [key] = open_bench(), make_keys("lost answer", 1)
    lost = [True]

    def fault(method: str, name: str, *_: Any) -> Any:
        if method == "PUT" and name.endswith(".kvb") and lost[0]:
            lost[0] = False
            row = bench.rows.row_view(0)
            server.objects[name] = row.tobytes()
            return "reset"
        return None

    server.fault = fault
    assert bench.store([key]) == [DONE]
    assert bench.load([key]) == [DONE]


@pytest.mark.parametrize("fault", ["reset", "hang", (503, "SlowDown"), (500, "InternalError")])
def test_a_sick_store_is_a_miss_and_comes_back(
    fault: Any, open_bench: OpenBench, server: FaultyS3
) -> None:
    hasty = {"read_timeout_s": 0.3} if fault == "hang" else {}
    bench, keys = open_bench(retries=1, **hasty), make_keys("sick", 6)
    _stored(bench, keys)
    server.fault = _blocks_only(fault)
    assert set(bench.load(keys)) == {FAILED}
    assert set(bench.store(make_keys("sick stores", 6))) <= {FAILED, SHED}
    bench.load(keys)
    assert bench.tier.counters()["breaker_opened"] >= 1
    if fault == "hang":
        assert bench.tier.counters()["timeouts"] >= 1
    server.fault = lambda *_: None
    server.released.set()
    _again(bench, keys)
    assert bench.tier.counters()["corrupt"] == 0


def test_while_the_breaker_is_open_nothing_is_asked_for(
    open_bench: OpenBench, server: FaultyS3
) -> None:
    bench = open_bench(retries=0, breaker_failures=2, breaker_s=60.0, breaker_most_s=60.0)
    keys = make_keys("open", 4)
    assert bench.store(keys) == [DONE] * 4
    server.fault = _blocks_only((503, "SlowDown"))
    bench.load(keys)
    asked = len(server.requests)
    assert bench.lookup([*keys, *make_keys("unknown", 4)]) == [Lookup.MISS] * 8
    assert bench.load(keys) == [FAILED] * 4
    assert len(server.requests) == asked
    [line] = bench.tier.describe()  # type: ignore[attr-defined]
    assert "the server answers 503 SlowDown; tried again in" in line


def test_access_denied_later_is_misses_and_counted(open_bench: OpenBench, server: FaultyS3) -> None:
    bench, keys = open_bench(breaker_failures=2), make_keys("denied", 4)
    assert bench.store(keys) == [DONE] * 4
    server.fault = _blocks_only((403, "AccessDenied"))
    assert set(bench.load(keys)) == {FAILED}
    bench.store(make_keys("denied stores", 2))
    assert bench.tier.counters()["denied"] >= 3
    server.fault = lambda *_: None
    _again(bench, keys)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((403, "AccessDenied"), "s3:PutObject"),
        ((403, "InvalidAccessKeyId"), "AWS_ACCESS_KEY_ID"),
        ((404, "NoSuchBucket"), f"there is no bucket '{BUCKET}'"),
        ((400, "AuthorizationHeaderMalformed"), "region"),
    ],
)
def test_a_start_that_cannot_work_is_one_clear_error(
    fault: Any, words: str, open_bench: OpenBench, server: FaultyS3
) -> None:
    server.fault = lambda *_: fault
    with pytest.raises(TierError) as caught:
        open_bench()
    assert words in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("method", "query", "right"),
    [("GET", "list-type", "s3:ListBucket"), ("POST", "delete", "s3:DeleteObject")],
)
def test_a_missing_right_is_named_at_the_start(
    method: str, query: str, right: str, open_bench: OpenBench, server: FaultyS3
) -> None:
    def fault(found: str, key: str, text: str, *_: Any) -> Any:
        return (403, "AccessDenied") if found == method and query in text else None

    server.fault = fault
    with pytest.raises(TierError, match=right):
        open_bench()


def test_a_store_that_is_away_at_the_start_is_waited_for(
    open_bench: OpenBench, server: FaultyS3
) -> None:
    server.fault = lambda *_: (503, "ServiceUnavailable")
    bench, keys = open_bench(), make_keys("away", 3)
    assert bench.lookup(keys) == [Lookup.MISS] * 3
    assert bench.store(keys) == [SHED] * 3
    server.fault = lambda *_: None
    bench.until(lambda: bench.store(keys) == [DONE] * 3, "the store is never reached")
    assert bench.load(keys) == [DONE] * 3


def test_no_answer_of_a_server_brings_a_secret_to_light(
    open_bench: OpenBench, server: FaultyS3, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal quotes the key, and the client's own text the whole request."""
    bench, keys = open_bench(retries=0), make_keys("secret", 3)
    code = f"SignatureDoesNotMatch</Code><X>{ACCESS} {SECRET} {TOKEN}</X><Code>"
    told = repr(bench.tier) + repr(bench.tier._settings)  # type: ignore[attr-defined]
    for status in (400, 403, 503):
        server.fault = lambda *_, status=status: (status, code)
        results = [bench.wait(job := bench.submit_load(keys))[job]]
        results.append(bench.wait(job := bench.submit_store(make_keys(f"s{status}", 2)))[job])
        told += str([result.reasons for result in results])
        told += str(bench.tier.describe())  # type: ignore[attr-defined]
        try:
            told += str(open_bench().tier.describe())  # type: ignore[attr-defined]
        except TierError as error:
            told += str(error)
        time.sleep(0.06)
    told += caplog.text
    for secret in (ACCESS, SECRET, TOKEN):
        assert secret not in told


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[_Service]:
    """The credentials come from a service on this machine, as in a container."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    token_file = tmp_path / "token"
    token_file.write_text("a word")
    with _Service() as service:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", service.url)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token_file))
        yield service


def _only(number: int, answer: tuple[int, str]) -> Callable[..., Any]:
    """Only the credentials that the service gives as this one are good, the others are answered."""

    def fault(method: str, key: str, query: str, headers: Any) -> Any:
        return None if f"AKIA{number}" in headers.get("authorization", "") else answer

    return fault


def test_an_expired_token_is_renewed(
    open_bench: OpenBench, server: FaultyS3, service: _Service
) -> None:
    """It runs out before its time; the next one is good."""
    bench, keys = open_bench(), make_keys("expired", 3)
    assert bench.store(keys) == [DONE] * 3
    good = service.given + 1
    server.fault = _only(good, (400, "ExpiredToken"))
    assert bench.load(keys) == [DONE] * 3
    assert service.given == good


def test_credentials_that_were_replaced_are_found_anew(
    open_bench: OpenBench, server: FaultyS3, service: _Service
) -> None:
    """A key is taken out of use, and only a while later there is another."""
    bench, keys = open_bench(), make_keys("replaced", 3)
    assert bench.store(keys) == [DONE] * 3
    server.fault = _only(service.given + 2, (403, "InvalidAccessKeyId"))
    assert FAILED in bench.load(keys)
    assert bench.tier.counters()["denied"] >= 1
    _again(bench, keys)


def test_a_load_that_answers_late_leaves_its_row_alone(
    open_bench: OpenBench, server: FaultyS3
) -> None:
    bench, keys = open_bench(), make_keys("late", 4)
    assert bench.store(keys) == [DONE] * 4
    server.fault = _blocks_only("hang")
    began_s = time.monotonic()
    assert bench.outcomes(bench.submit_load(keys, began_s + 0.1)) == [LATE] * 4
    # The result is there although the answers are not: nothing is written when they come.
    server.fault = lambda *_: None
    server.released.set()
    assert bench.tier.drain(20.0)
    bench.check_free_rows()


def test_a_slow_store_sheds_stores_and_goes_on(tmp_path: Any) -> None:
    gate = threading.Event()
    settings = make_settings(f"file://{tmp_path}/s", queue_blocks=8, concurrency=2)

    def hook(operation: str, name: str) -> None:
        if operation == "create" and name.endswith(".kvb"):
            gate.wait(20)

    rows = RowBuffer(32, ROW_BYTES)
    tier = ObjectTier(make_context(rows), settings, client=HookedClient(settings, hook))
    bench = TierBench(tier, rows, 20.0)
    first, second = (
        bench.submit_store(make_keys("slow", 8)),
        bench.submit_store(make_keys("shed", 6)),
    )
    bench.poll()
    gate.set()
    assert bench.outcomes(first) == [DONE] * 8
    assert bench.outcomes(second) == [SHED] * 6
    assert bench.store(make_keys("after", 4)) == [DONE] * 4
    bench.close()


@pytest.mark.parametrize("operation", ["create", "fetch", "front", "size", "list", "delete"])
def test_every_request_may_fail_and_no_key_is_lost(operation: str, tmp_path: Any) -> None:
    """Every third request of a kind fails, of whatever key; everything ends, and ends right."""
    numbers = iter(range(10**6))

    def hook(found: str, name: str) -> None:
        if found == operation and armed and next(numbers) % 3 == 0:
            raise Sick("an injected fault")

    armed = False
    settings = make_settings(f"file://{tmp_path}/s", **{**QUICK, "retries": 1})
    rows = RowBuffer(32, ROW_BYTES)
    client = HookedClient(settings, hook)
    bench = TierBench(ObjectTier(make_context(rows), settings, client=client), rows, 20.0)
    armed = True
    keys = make_keys("any", 12)
    for _ in range(3):
        assert set(bench.store(keys)) <= {DONE, FAILED, SHED}
        assert set(bench.load(keys)) <= {DONE, FAILED, Outcome.MISSING}
        bench.lookup([*keys, *make_keys("other", 4)])
    armed = False
    bench.until(lambda: bench.store(keys) == [DONE] * 12, "stores never come back")
    bench.until(lambda: bench.load(keys) == [DONE] * 12, "loads never come back")
    bench.close()


def test_https_to_a_server_without_it_says_so(server: FaultyS3) -> None:
    settings = make_settings(
        f"s3://{BUCKET}/x", **{**QUICK, "endpoint": server.endpoint.replace("http:", "https:")}
    )
    with pytest.raises(faults.StoreFault) as caught:
        ObjectClient(settings).size("x")
    assert "TLS" in str(caught.value) or isinstance(caught.value, Sick)


def test_a_panic_inside_the_client_is_one_keys_failure(tmp_path: Path) -> None:
    class PanicException(BaseException):
        """As the client's language raises it: no Exception."""

    armed = [False]

    def hook(operation: str, name: str) -> None:
        if operation == "fetch" and armed[0]:
            armed[0] = False
            raise PanicException(SECRET)

    settings = make_settings(f"file://{tmp_path}/s", concurrency=1)
    rows = RowBuffer(8, ROW_BYTES)
    client = HookedClient(settings, hook)
    bench = TierBench(ObjectTier(make_context(rows), settings, client=client), rows, 20.0)
    keys = make_keys("panic", 3)
    assert bench.store(keys) == [DONE] * 3
    armed[0] = True
    assert sorted(bench.load(keys), key=str) == [DONE, DONE, FAILED]
    assert bench.load(keys) == [DONE] * 3
    bench.close()


def test_an_error_of_an_unknown_kind_is_not_quoted() -> None:
    assert SECRET not in str(classify(RuntimeError(f"something with {SECRET}")))


class _Service:
    """What gives credentials out, the next one each time."""

    def __init__(self) -> None:
        self.given = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                """Tests' output is theirs."""

            def do_GET(self) -> None:
                outer.given += 1
                answer = {
                    "AccessKeyId": f"AKIA{outer.given}",
                    "SecretAccessKey": SECRET,
                    "Token": TOKEN,
                    "Expiration": "2099-01-01T00:00:00Z",
                }
                data = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/credentials"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    def __enter__(self) -> _Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
