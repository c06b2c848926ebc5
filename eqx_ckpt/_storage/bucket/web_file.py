"""A file behind the URL of a web server."""

import contextlib
from collections.abc import Generator
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from ..._errors import CheckpointError
from ..calls.store_path import censored
from .remote_file import RemoteFile, RemoteReads
from .store_patience import LAST_PATIENCE, wait_patiently


# TensorStore's, of a file whose server gives no strong ETag.
_NO_GENERATION = b"\x10"


class WebFile(RemoteFile):
    """A file of a web server that answers requests for ranges.

    Where the server gives no strong ETag, the size of the file and the time of its last
    change are compared before and after it is read.
    """

    def __init__(self, url: str) -> None:
        _check(url)
        self._url = url
        self._state = _state(url)
        super().__init__({"driver": "http", "base_url": url}, "", censored(url))

    @contextlib.contextmanager
    def opened(self) -> Generator[RemoteReads, None, None]:
        with super().opened() as reads:
            try:
                yield reads
            finally:
                has_no_tag = self._generation == _NO_GENERATION
                if has_no_tag and _state(self._url) != self._state:
                    raise self._changed()

    def beside(self, name: str) -> "WebFile":
        parts = urlsplit(self._url)
        folder = parts.path.rpartition("/")[0]
        return WebFile(parts._replace(path=f"{folder}/{name}").geturl())

    def _wait_for(self, future: Any) -> Any:
        return wait_patiently(self._spec, future, self.path)

    def _check_missing(self) -> None:
        pass


def _check(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_plain = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_plain = False
    else:
        is_plain = is_plain and not (parts.fragment or parts.username)
    if not is_plain or not url.isascii() or not url.isprintable() or " " in url:
        raise CheckpointError(
            f"{censored(url)!r} is not the URL of a file that can be read. Pass "
            "`https://host/path`, without a user and a `#`, and percent-encoded."
        )


def _state(url: str) -> tuple[str | None, ...]:
    """What a server says of a file, without its data.

    Nothing if it answers with an error, which a read will report. Raise if it sends the
    request elsewhere, or would send all of the file for each part.
    """
    # These imports take as long as that of NumPy.
    import http.client
    import urllib.error
    import urllib.request

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(
            self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
        ) -> None:
            return None

    request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
    try:
        opener = urllib.request.build_opener(Stay)
        with opener.open(request, timeout=LAST_PATIENCE) as answer:
            if answer.status == HTTPStatus.PARTIAL_CONTENT:
                told = ("ETag", "Last-Modified", "Content-Range")
                return tuple(answer.headers[name] for name in told)
    except urllib.error.HTTPError as e:
        e.close()
        if e.code in range(300, 400):
            to = censored(e.headers["Location"] or "nowhere")
            raise CheckpointError(
                f"{censored(url)!r} sends requests elsewhere (status {e.code}), to "
                f"{to!r}, which is not followed. Pass the URL of the file itself, or "
                "download it."
            ) from None
        return ()
    except (OSError, ValueError, http.client.HTTPException):
        return ()
    raise CheckpointError(
        f"The server of {censored(url)!r} does not send parts of files (status "
        f"{answer.status} for a range). Download the file, and pass its path."
    )
