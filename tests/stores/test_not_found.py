"""A server that answers 404 to all: a wrong endpoint, or a proxy in the way."""

import http.server
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import eqx_ckpt


TREE = {"w": np.ones(3)}


class Nothing(http.server.BaseHTTPRequestHandler):
    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b"<html>There is no such page.</html>"
        self.send_response(404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[eqx_ckpt.StorePath]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        yield eqx_ckpt.StorePath(
            "s3://bucket/run", endpoint=endpoint, region="us-east-1"
        )
        server.shutdown()


def test_every_error_names_the_location(store: eqx_ckpt.StorePath) -> None:
    manager = eqx_ckpt.CheckpointManager(store)
    for call in (
        manager.latest,
        manager.steps,
        lambda: manager.restore(TREE),
        lambda: manager.restore(TREE, 3),
        lambda: manager.save(1, TREE).result(),
        lambda: manager.delete(1),
        lambda: eqx_ckpt.inspect.read_manifest(store),
        lambda: eqx_ckpt.tree_serialise_leaves(store, TREE),
        lambda: eqx_ckpt.tree_serialise_leaves(store, TREE, layout="ocdbt"),
        lambda: eqx_ckpt.inspect.garbage_collect(store, dry_run=True),
        lambda: eqx_ckpt.recording.Recording(store, TREE),
    ):
        with pytest.raises(eqx_ckpt.CheckpointError) as raised:
            call()
        assert type(raised.value) is eqx_ckpt.CheckpointError
        assert "knows nothing at s3://bucket/run" in str(raised.value)
        assert "Look at the endpoint and the bucket." in str(raised.value)
