"""A web server with files in memory, which sends parts of them."""

import hashlib
import re
from http import HTTPStatus

from . import serving


class Web(serving.Server):
    """Files by their paths.

    **Attributes:**

    - `tags`: whether it tells an ETag; otherwise, the time of the last change.
    - `sends_parts`: whether it does so, or always sends all of a file.
    - `sent`: the bytes of each part that it has sent.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.changes: dict[str, str] = {}
        self.moved: dict[str, str] = {}
        self.refused: dict[str, int] = {}
        self.tags = self.sends_parts = True
        self.sent: list[int] = []
        super().__init__(_Exchange)


class _Exchange(serving.Exchange):
    server: Web  # pyright: ignore[reportIncompatibleVariableOverride]

    def respond(self) -> None:
        server, path = self.server, self.path.partition("?")[0]
        if path in server.moved:
            self.answer(HTTPStatus.FOUND, {"Location": server.moved[path]})
            return
        if path in server.refused:
            self.answer(server.refused[path])
            return
        data = server.files.get(path)
        if data is None:
            self.answer(HTTPStatus.NOT_FOUND)
            return
        headers = {"Last-Modified": server.changes.get(path, "never")}
        if server.tags:
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None or not server.sends_parts:
            self.answer(HTTPStatus.OK, headers, data)
            return
        first, last = asked.groups()
        start = int(first) if first else max(0, len(data) - int(last))
        stop = min(int(last) + 1, len(data)) if first and last else len(data)
        if start >= len(data):
            headers["Content-Range"] = f"bytes */{len(data)}"
            self.answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers)
            return
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        server.sent.append(stop - start)
        self.answer(HTTPStatus.PARTIAL_CONTENT, headers, data[start:stop])
