"""The object stores of the tests keep their word, and the proxy breaks it as told."""

import contextlib
import hashlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tensorstore as ts

from stores import proxy
from stores.place import Place
from stores.s3 import REGION


RETRIES = {"max_retries": 4, "initial_delay": "1ms", "max_delay": "1ms"}
TIMEOUT = 20  # seconds
WRITE = {"s3": "PUT", "gs": "POST"}
BODY = bytes(range(256)) * 4


@pytest.fixture(params=["s3", "small_s3", "gcs"])
def place(request: pytest.FixtureRequest) -> Place:
    return request.getfixturevalue(request.param)


@pytest.fixture
def kv(place: Place) -> ts.KvStore:
    context = ts.Context(
        {"s3_request_retries": RETRIES, "gcs_request_retries": RETRIES}
    )
    return ts.KvStore.open(place.spec, context=context).result(timeout=TIMEOUT)


def read(kv: ts.KvStore, key: str = "key", **kwargs: Any) -> bytes:
    return kv.read(key, **kwargs).result(timeout=TIMEOUT).value


def write(kv: ts.KvStore, body: bytes = BODY, key: str = "key", **kwargs: Any) -> bytes:
    """Write an object; the generation, which is empty if a condition does not hold."""
    return kv.write(key, body, **kwargs).result(timeout=TIMEOUT).generation


def absent(kv: ts.KvStore) -> bytes:
    """The generation of what is not there."""
    return kv.read("absent").result(timeout=TIMEOUT).stamp.generation


def keys(kv: ts.KvStore) -> list[bytes]:
    return sorted(kv.list().result(timeout=TIMEOUT))


def test_conditions(kv: ts.KvStore) -> None:
    first = write(kv, b"first", if_equal=absent(kv))
    assert first
    assert write(kv, b"lost", if_equal=absent(kv)) == b""
    second = write(kv, b"second", if_equal=first)
    assert second not in (b"", first)
    assert write(kv, b"late", if_equal=first) == b""
    assert read(kv) == b"second"


def test_list_and_delete(kv: ts.KvStore, place: Place) -> None:
    names = [f"{i:04d}" for i in range(12)]
    for name in names:
        write(kv, b"", key=name)
    assert keys(kv) == [name.encode() for name in names]
    kv.delete_range(ts.KvStore.KeyRange("0003", "0011")).result(timeout=TIMEOUT)
    assert keys(kv) == [b"0000", b"0001", b"0002", b"0011"]
    assert len(place.proxy.found("DELETE")) == 8


def test_byte_range(kv: ts.KvStore) -> None:
    write(kv)
    assert read(kv, byte_range=slice(3, 9)) == BODY[3:9]
    assert read(kv, byte_range=slice(1000, None)) == BODY[1000:]
    assert read(kv, byte_range=slice(-4, None)) == BODY[-4:]


def asked(place: Place, method: str, path: str, **headers: str) -> tuple[Any, ...]:
    """What a client is told, but for times and numbers of requests."""
    client = http.client.HTTPConnection("127.0.0.1", place.proxy.port, timeout=TIMEOUT)
    body = BODY if method == "PUT" else None
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    named["Authorization"] = f"AWS4-HMAC-SHA256 Credential=testing/1/{REGION}/s3/aws4"
    client.request(method, f"/{place.bucket}{path}", body, named)
    reply = client.getresponse()
    said = reply.read()
    client.close()
    if b"<Error>" in said or b"<ListBucketResult" in said:
        tags = rb"<(Code|IsTruncated|Contents><Key|ETag|Size)>([^<]*)"
        said = re.findall(tags, said)
    names = "ETag", "Content-Length", "Content-Range"
    told = [
        reply.headers[name] for name in names if reply.status < 400 and "?" not in path
    ]
    return method, path, headers, reply.status, told, said


def test_the_small_s3_answers_as_moto_does(s3: Place, small_s3: Place) -> None:
    """All that TensorStore asks; both get it one after the other."""
    tag, other = f'"{hashlib.md5(BODY).hexdigest()}"', '"other"'
    conditions: list[dict[str, str]] = [
        {"if_match": tag},
        {"if_match": other},
        {"if_match": '""'},
        {"if_none_match": "*"},
        {"if_none_match": tag},
    ]
    parts = ("0-0", "3-8", "1000-", "-4", "0-4096", "1024-1024", "2048-")
    reads = [{}, *conditions, *({"range": f"bytes={part}"} for part in parts)]
    there: list[tuple[str, dict[str, str]]]
    there = [(method, how) for method in ("GET", "HEAD") for how in reads]
    questions = [
        ("GET", "/?list-type=2&prefix=run%2F", {}),
        *((method, "/run/%40a%20b", how) for method, how in there),
        *(("PUT", "/run/absent", how) for how in conditions[:3]),
        *(("PUT", "/run/%40a%20b", how) for how in ({}, {"if_none_match": "*"})),
        *((method, "/run/%40a%20b", how) for method, how in there),
        *(("PUT", "/run/%40a%20b", how) for how in conditions[:4]),
        *(("PUT", f"/run/{name}", {}) for name in "cba"),
        ("GET", "/?list-type=2&prefix=run%2F", {}),
        ("GET", "/?list-type=2&prefix=run%2F&max-keys=2", {}),
        ("GET", "/?list-type=2&prefix=run%2F&start-after=run%2Fa", {}),
        ("GET", "/?list-type=2&prefix=nothing", {}),
        ("DELETE", "/run/a", {}),
        ("DELETE", "/run/a", {}),
        ("GET", "/run/a", {}),
        ("GET", "-absent/?list-type=2&prefix=", {}),
        ("GET", "-absent/run/a", {}),
    ]
    for method, path, how in questions:
        found = asked(small_s3, method, path, **how)
        assert found == asked(s3, method, path, **how)


def test_one_of_many_writers_wins(kv: ts.KvStore) -> None:
    condition, barrier = absent(kv), threading.Barrier(8)
    won: list[int] = []

    def race(writer: int) -> None:
        barrier.wait()
        if write(kv, b"%d" % writer, if_equal=condition):
            won.append(writer)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [read(kv)] == [b"%d" % writer for writer in won]


@pytest.mark.parametrize("action", [proxy.answered(503), proxy.reset])
def test_not_forwarded(kv: ts.KvStore, place: Place, action: Any) -> None:
    rule = place.proxy.add(action, path="key", when=range(1, 3))
    assert write(kv)
    assert (rule.struck, rule.seen) == (2, 3)
    assert [request.stored for request in place.proxy.requests] == [0, 0, 200]
    assert place.proxy.requests[-1].status == 200


def test_for_ever(kv: ts.KvStore, place: Place) -> None:
    place.proxy.add(proxy.answered(503), path="key")
    # The lowest TensorStore says UNAVAILABLE.
    with pytest.raises(ValueError, match="^(ABORTED|UNAVAILABLE): "):
        write(kv)
    assert [request.status for request in place.proxy.found(path="key")] == [503] * 5
    place.proxy.rules.clear()
    assert write(kv)


def test_forbidden(kv: ts.KvStore, place: Place) -> None:
    place.proxy.add(proxy.answered(403))
    with pytest.raises(ValueError, match="^PERMISSION_DENIED"):
        read(kv)


def test_an_error_of_gcs_lists_nothing(gcs: Place) -> None:
    # TensorStore does not look at the status, so no list of GCS is to be trusted.
    kv = ts.KvStore.open(gcs.spec).result(timeout=TIMEOUT)
    write(kv)
    gcs.proxy.add(proxy.answered(403), "GET", proxy.LIST)
    assert keys(kv) == []


def test_lost_reply(kv: ts.KvStore, place: Place) -> None:
    condition = absent(kv)
    rule = place.proxy.add(proxy.lost, WRITE[place.url[:2]], "key", when={1})
    # The second request finds what the first has stored.
    assert write(kv, if_equal=condition) == b""
    assert read(kv) == BODY
    tries = place.proxy.found(rule.method, "key")
    assert [(r.stored, r.status) for r in tries] == [(200, 0), (412, 412)]


@pytest.mark.parametrize(
    ("action", "found"),
    [
        (proxy.halved, BODY[:512]),
        (proxy.flipped, BODY[:512] + b"\1" + BODY[513:]),
    ],
)
def test_silent_damage(
    kv: ts.KvStore, place: Place, action: Callable[..., None], found: bytes
) -> None:
    write(kv)
    place.proxy.add(action, "GET", "key")
    assert read(kv) == found


def test_torn_body_is_read_again(kv: ts.KvStore, place: Place) -> None:
    write(kv)
    rule = place.proxy.add(proxy.torn, "GET", "key", when={1})
    assert read(kv) == BODY
    assert rule.seen == 2


def test_flipped_request(kv: ts.KvStore, place: Place) -> None:
    place.proxy.add(proxy.flipped_request, path="key", when={1})
    write(kv)
    assert read(kv) == BODY[:512] + b"\1" + BODY[513:]


def test_hang_ends_with_the_proxy(place: Place) -> None:
    """By a plain client: TensorStore now and then notices an end only much later."""
    asked = threading.Event()

    def hang(exchange: proxy.Exchange) -> None:
        asked.set()
        proxy.hung(exchange)

    place.proxy.add(hang)
    with socket.create_connection(("127.0.0.1", place.proxy.port)) as client:
        client.sendall(b"GET /key HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert asked.wait(TIMEOUT)
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(TIMEOUT)
        place.proxy.stop()
        # An end or a reset: two threads of the proxy end the connection.
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""


def test_slow(kv: ts.KvStore, place: Place) -> None:
    place.proxy.add(proxy.slow(0.2))
    begin = time.monotonic()
    write(kv)
    assert time.monotonic() - begin >= 0.2


def test_stale_list(kv: ts.KvStore, place: Place) -> None:
    write(kv, key="old")
    place.proxy.add(proxy.stale(), "GET", proxy.LIST)
    assert keys(kv) == [b"old"]
    write(kv, key="new")
    assert keys(kv) == [b"old"]
    place.proxy.rules.clear()
    assert keys(kv) == [b"new", b"old"]


def test_conditions_ignored(kv: ts.KvStore, place: Place) -> None:
    condition = absent(kv)
    place.proxy.add(proxy.unconditional)
    assert write(kv, b"first", if_equal=condition)
    assert write(kv, b"second", if_equal=condition)
    assert read(kv) == b"second"
