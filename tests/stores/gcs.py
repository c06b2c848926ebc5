"""A GCS in memory: as much of its JSON API as TensorStore uses."""

import base64
import hashlib
import json
import threading
import urllib.parse
from typing import Any, NamedTuple

from . import serving
from .serving import Reply


class Blob(NamedTuple):
    """A version of an object."""

    body: bytes
    generation: int


class Store:
    """Buckets by name, each of objects by name; one lock makes conditions atomic."""

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, Blob]] = {}
        self.lock = threading.Lock()
        self.generation = 1000

    def make_bucket(self, name: str) -> None:
        self.buckets[name] = {}

    def ask(self, exchange: serving.Exchange) -> Reply:
        url = urllib.parse.urlsplit(exchange.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        # /storage/v1/b/BUCKET/o/NAME or /upload/storage/v1/b/BUCKET/o
        bucket, _, name = url.path.partition("/b/")[2].partition("/o")
        name = urllib.parse.unquote(name[1:]) or query.get("name", "")
        with self.lock:
            answer = _Request(self, exchange, query).answer(bucket, name)
        return Reply(*answer, length=None)


class _Request:
    """A request of the JSON API."""

    def __init__(
        self, store: Store, exchange: serving.Exchange, query: dict[str, str]
    ) -> None:
        self._store, self._query = store, query
        self._command, self._headers = exchange.command, exchange.headers
        self._body = exchange.body

    def answer(self, bucket: str, name: str) -> tuple[int, dict[str, str], bytes]:
        blobs = self._store.buckets.get(bucket)
        if blobs is None:
            return _error(404, "The specified bucket does not exist.")
        if "Authorization" not in self._headers:
            return _error(401, "Anonymous caller does not have access.")
        if not name:
            return self._list(bucket, blobs)
        blob = blobs.get(name)
        if blob is None and self._command != "POST":
            return _error(404, f"No such object: {bucket}/{name}")
        if not self._holds(blob):
            return _error(304 if self._command == "GET" else 412, "conditionNotMet")
        if self._command == "POST":
            self._store.generation += 1
            blobs[name] = blob = Blob(self._body, self._store.generation)
        elif self._command == "DELETE":
            del blobs[name]
            return 204, {}, b""
        elif self._query.get("alt") == "media":
            return self._read(blob)
        return _json(_metadata(bucket, name, blob))

    def _holds(self, blob: Blob | None) -> bool:
        """Whether the request's conditions hold."""
        generation = str(blob.generation if blob else 0)
        is_to_be = self._query.get("ifGenerationMatch", generation)
        return is_to_be == generation != self._query.get("ifGenerationNotMatch")

    def _list(
        self, bucket: str, blobs: dict[str, Blob]
    ) -> tuple[int, dict[str, str], bytes]:
        ask = self._query.get
        names = sorted(
            name
            for name in blobs
            if name.startswith(ask("prefix", ""))
            and max(ask("startOffset", ""), ask("pageToken", "")) <= name
            and (not ask("endOffset") or name < ask("endOffset", ""))
        )
        most = int(ask("maxResults", "1000"))
        items = [_metadata(bucket, name, blobs[name]) for name in names[:most]]
        more = {"nextPageToken": names[most]} if len(names) > most else {}
        return _json({"kind": "storage#objects", "items": items, **more})

    def _read(self, blob: Blob) -> tuple[int, dict[str, str], bytes]:
        body, size = blob.body, len(blob.body)
        headers = {
            "x-goog-generation": str(blob.generation),
            "x-goog-stored-content-length": str(size),
        }
        if "Range" not in self._headers:
            return 200, headers, body
        first, last = self._headers["Range"].removeprefix("bytes=").split("-")
        begin = int(first) if first else max(0, size - int(last))
        end = min(int(last) + 1, size) if first and last else size
        if begin >= end:
            return 416, {"Content-Range": f"bytes */{size}"}, b""
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        return 206, headers, body[begin:end]


def _metadata(bucket: str, name: str, blob: Blob) -> dict[str, str]:
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "generation": str(blob.generation),
        "size": str(len(blob.body)),
        "md5Hash": base64.b64encode(hashlib.md5(blob.body).digest()).decode(),
    }


def _json(value: Any, status: int = 200) -> tuple[int, dict[str, str], bytes]:
    headers = {"Content-Type": "application/json; charset=UTF-8"}
    return status, headers, json.dumps(value).encode()


def _error(status: int, message: str) -> tuple[int, dict[str, str], bytes]:
    if status == 304:
        return status, {}, b""
    return _json({"error": {"code": status, "message": message}}, status)
