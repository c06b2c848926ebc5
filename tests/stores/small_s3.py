"""As much of S3 as TensorStore uses, for tests that make thousands of requests.

It answers what moto answers, in a tenth of the time: see test_servers.py.
"""

import hashlib
import threading
import time
import urllib.parse
from email.utils import formatdate
from typing import NamedTuple
from xml.sax.saxutils import escape

from . import serving
from .serving import Reply


_MOST = 1000  # of the keys in one answer to LIST
_XML = '<?xml version="1.0" encoding="utf-8"?>\n'


class Thing(NamedTuple):
    """An object."""

    body: bytes
    tag: str
    time: float


class Store:
    """Buckets by name, each of objects by key; one lock makes conditions atomic."""

    def __init__(self) -> None:
        self._buckets: dict[str, dict[str, Thing]] = {}
        self._lock = threading.Lock()

    def make_bucket(self, name: str) -> None:
        self._buckets[name] = {}

    def ask(self, exchange: serving.Exchange) -> Reply:
        url = urllib.parse.urlsplit(exchange.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(url.path)[1:].partition("/")
        with self._lock:
            things = self._buckets.get(bucket)
            if things is None:
                reply = _error(404, "NoSuchBucket")
            elif not key:
                assert exchange.command == "GET", exchange.command
                assert query.pop("list-type") == "2"
                reply = _list(things, query)
            else:
                assert not query, query
                reply = _answer(things, key, exchange)
        if exchange.command == "HEAD":
            length = len(reply.body) if reply.status < 400 else 0
            return reply._replace(body=b"", length=length)
        return reply


def _answer(things: dict[str, Thing], key: str, exchange: serving.Exchange) -> Reply:
    command, headers = exchange.command, exchange.headers
    thing = things.get(key)
    if command == "DELETE":
        things.pop(key, None)
        return Reply(204, {}, b"", None)
    if thing is None and (command != "PUT" or "if-match" in headers):
        return _error(404, "NoSuchKey")
    tag = thing.tag if thing else None
    if headers.get("if-match", tag) != tag:
        return _error(412, "PreconditionFailed")
    unless = headers.get("if-none-match")
    if command == "PUT":
        assert unless in (None, "*"), unless
        if thing and unless:
            return _error(412, "PreconditionFailed")
        tag = f'"{hashlib.md5(exchange.body).hexdigest()}"'
        things[key] = Thing(exchange.body, tag, time.time())
        return Reply(200, {"ETag": tag}, b"", None)
    assert thing is not None
    assert command in ("GET", "HEAD"), command
    if unless == thing.tag:
        return Reply(304, {"ETag": thing.tag}, b"", None)
    return _read(thing, headers.get("range", ""))


def _read(thing: Thing, part: str) -> Reply:
    body, size = thing.body, len(thing.body)
    headers = {
        "ETag": thing.tag,
        "last-modified": formatdate(thing.time, usegmt=True),
        "content-type": "application/octet-stream",
        "Accept-Ranges": "bytes",
    }
    if not part:
        return Reply(200, headers, body, None)
    first, last = part.removeprefix("bytes=").split("-")
    begin = int(first) if first else max(0, size - int(last))
    end = min(int(last) + 1, size) if first and last else size
    if begin >= end:
        return _error(416, "InvalidRange")
    headers["content-range"] = f"bytes {begin}-{end - 1}/{size}"
    return Reply(206, headers, body[begin:end], None)


def _list(things: dict[str, Thing], query: dict[str, str]) -> Reply:
    prefix = query.pop("prefix", "")
    after = query.pop("continuation-token", "") or query.pop("start-after", "")
    most = int(query.pop("max-keys", _MOST))
    assert not query, query
    keys = sorted(key for key in things if key.startswith(prefix) and key > after)
    more = len(keys) > most
    parts = [f"<IsTruncated>{str(more).lower()}</IsTruncated>"]
    if more:
        token = escape(keys[most - 1])
        parts.append(f"<NextContinuationToken>{token}</NextContinuationToken>")
    for key in keys[:most]:
        body, tag, when = things[key]
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(when))
        parts.append(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{stamp}</LastModified>"
            f"<ETag>{tag}</ETag><Size>{len(body)}</Size></Contents>"
        )
    space = "http://s3.amazonaws.com/doc/2006-03-01/"
    xml = f'<ListBucketResult xmlns="{space}">{"".join(parts)}</ListBucketResult>'
    headers = {"Content-Type": "application/xml"}
    return Reply(200, headers, (_XML + xml).encode(), None)


def _error(status: int, code: str) -> Reply:
    xml = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    headers = {"Content-Type": "application/xml"}
    return Reply(status, headers, (_XML + xml).encode(), None)
