"""What the tests of S3 have in common, and an S3 that is there already."""

import http.client
import os
import urllib.parse

from . import serving
from .serving import Reply


REGION = "us-east-1"
# A bucket that is there already: see scripts/radosgw.
GIVEN = os.environ.get("EQX_CKPT_TEST_BUCKET", "")
# Headers of a connection, not of what is sent through it.
HOP = {"connection", "content-length", "keep-alive", "transfer-encoding"}


class Given:
    """An S3 that somebody else has started on this machine, with a bucket."""

    def __init__(self, endpoint: str, bucket: str) -> None:
        port = urllib.parse.urlsplit(endpoint).port
        assert port is not None, endpoint
        self._port, self.bucket = port, bucket

    def ask(self, exchange: serving.Exchange) -> Reply:
        store = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        headers = {k: v for k, v in exchange.headers.items() if k.lower() not in HOP}
        store.request(exchange.command, exchange.path, exchange.body or None, headers)
        reply = store.getresponse()
        body = reply.read()
        store.close()
        headers = {k: v for k, v in reply.getheaders() if k.lower() not in HOP}
        length = None
        if exchange.command == "HEAD":
            length = int(reply.getheader("Content-Length", 0))
        return Reply(reply.status, headers, body, length)
