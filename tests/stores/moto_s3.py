"""An S3 in memory: moto, which takes half a second to import."""

import http.client
import io
import sys
import threading
import urllib.parse
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import create_backend_app, MotoRequestHandler
from werkzeug.serving import make_server
from werkzeug.test import run_wsgi_app

from . import serving
from .s3 import HOP
from .serving import Reply


class Server:
    """As `moto.server.ThreadedMotoServer`, but silent, atomic, and S3 only.

    moto looks at a condition and then writes, so it gets one request after the other.
    """

    def __init__(self) -> None:
        self._app = create_backend_app("s3")
        self._lock = threading.Lock()
        server = make_server("127.0.0.1", 0, self._respond, request_handler=_Silent)
        self._server = server
        self.port = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def make_bucket(self, name: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("PUT", f"/{name}")
        assert connection.getresponse().status == 200
        connection.close()

    def ask(self, exchange: serving.Exchange) -> Reply:
        """Without a connection, which would cost as much as the answer."""
        body, status, headers = run_wsgi_app(self._respond, self._environ(exchange))
        sent = {k: v for k, v in headers if k.lower() not in HOP}
        length = None
        if exchange.command == "HEAD":
            length = int(headers.get("Content-Length", 0))
        return Reply(int(status.split()[0]), sent, b"".join(body), length)

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def _respond(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        with self._lock:
            return self._app(environ, start)

    def _environ(self, exchange: serving.Exchange) -> dict[str, Any]:
        path, _, query = exchange.path.partition("?")
        environ = {
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(exchange.body),
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
            "REQUEST_METHOD": exchange.command,
            "SCRIPT_NAME": "",
            "PATH_INFO": urllib.parse.unquote(path).encode().decode("latin1"),
            "QUERY_STRING": query,
            "REQUEST_URI": exchange.path,
            "RAW_URI": exchange.path,
            "SERVER_NAME": "127.0.0.1",
            "SERVER_PORT": str(self.port),
            "SERVER_PROTOCOL": "HTTP/1.1",
            "CONTENT_LENGTH": str(len(exchange.body)),
            "CONTENT_TYPE": exchange.headers.get("Content-Type", ""),
        }
        for name, value in exchange.headers.items():
            if name.lower() not in HOP:
                environ["HTTP_" + name.upper().replace("-", "_")] = value
        return environ


class _Silent(MotoRequestHandler):
    timeout = 30  # seconds, of silence in the middle of a request

    def log(self, type: str, message: str, *args: Any) -> None:
        pass
