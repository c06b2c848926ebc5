"""An S3 in memory."""

import http.client
import os
import threading
import urllib.parse
from typing import Any

from moto.moto_server.werkzeug_app import create_backend_app, MotoRequestHandler
from werkzeug.serving import make_server


REGION = "us-east-1"
# A bucket that is there already: see scripts/radosgw.
GIVEN = os.environ.get("EQX_CKPT_TEST_BUCKET", "")


class Server:
    """As `moto.server.ThreadedMotoServer`, but silent, atomic, and S3 only.

    moto looks at a condition and then writes, so it gets one request after the other.
    """

    def __init__(self) -> None:
        app = create_backend_app("s3")
        self._server = make_server("127.0.0.1", 0, app, request_handler=_Silent)
        self.port = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def make_bucket(self, name: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("PUT", f"/{name}")
        assert connection.getresponse().status == 200
        connection.close()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()


class Given:
    """An S3 that somebody else has started on this machine, with a bucket."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        port = urllib.parse.urlsplit(endpoint).port
        assert port is not None, endpoint
        self.port, self.bucket = port, bucket


class _Silent(MotoRequestHandler):
    timeout = 30  # seconds, of silence in the middle of a request

    def log(self, type: str, message: str, *args: Any) -> None:
        pass
