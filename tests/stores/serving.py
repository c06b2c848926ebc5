"""A small HTTP/1.1 server with a thread per connection."""

import contextlib
import socket
import socketserver
import sys
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple, Protocol


class Reply(NamedTuple):
    """What a store says."""

    status: int
    headers: dict[str, str]
    body: bytes
    length: int | None  # only if it is not that of the body


class Store(Protocol):
    """Objects in buckets, in this process or elsewhere."""

    def ask(self, exchange: "Exchange") -> Reply:
        """What it says to a request."""
        ...


class Server(socketserver.ThreadingTCPServer):
    """Listens on a free port of this machine, from its creation until `stop`."""

    daemon_threads = False  # So `stop` waits for each of them.
    request_queue_size = 128

    def __init__(self, exchange: type["Exchange"]) -> None:
        super().__init__(("127.0.0.1", 0), exchange)
        self.port: int = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.stopping = threading.Event()
        self._connections: set[Any] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        """End every connection and every thread."""
        self.stopping.set()
        self.shutdown()
        self._thread.join()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client may go away when it likes.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Exchange(BaseHTTPRequestHandler):
    """A request with its `body`, and its answer."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    body: bytes

    def respond(self) -> None:
        """Answer the request, or not."""
        raise NotImplementedError

    def answer(
        self,
        status: int,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        length: int | None = None,
    ) -> None:
        """Send an answer; if its `length` is not that of `body`, it ends too early."""
        length = len(body) if length is None else length
        self.send_response_only(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.close_connection = self.close_connection or length != len(body)

    def abort(self) -> None:
        """Reset the connection."""
        # To linger for no time is to send a reset instead of an end.
        linger = b"\1\0\0\0\0\0\0\0"
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True
        self.rfile.close()
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _receive(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.respond()

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = _receive
