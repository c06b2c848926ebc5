"""The fixtures of the tests with an object store.

Nothing is imported from the package before its type checks are installed.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from . import gcs as gcs_server, s3 as s3_server, small_s3 as small_s3_server
from .place import Place
from .proxy import Proxy


# The tests that ask whether S3 is spoken as it should be: what answers them is moto,
# which others have written. A request costs it as much as all else in a test.
ON_MOTO = {"test_conformance", "test_readme", "test_servers", "test_stores"}
_NUMBERS = itertools.count(1)


class Clock:
    """Instead of the clock that decides which attempt is dead."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    from support import heartbeat, run_sweeps

    clock = Clock()
    monkeypatch.setattr(heartbeat, "clock", clock)
    # What a sweep has done is looked at when it has ended.
    monkeypatch.setattr(run_sweeps, "PATIENCE", 600.0)
    return clock


@pytest.fixture(scope="session")
def s3_backend() -> Iterator[Any]:
    """The S3 itself."""
    if s3_server.GIVEN:
        yield s3_server.Given(os.environ["AWS_ENDPOINT_URL"], s3_server.GIVEN)
        return
    from .moto_s3 import Server

    server = Server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def small_s3_backend() -> small_s3_server.Store:
    """An S3 for thousands of requests."""
    return small_s3_server.Store()


@pytest.fixture(scope="session")
def gcs_backend() -> gcs_server.Store:
    """The GCS itself."""
    return gcs_server.Store()


# TensorStore looks up the credentials of S3 and the URL of GCS whenever it opens a
# store, but keeps the first token of GCS for ever. It does not look at AWS_REGION nor
# AWS_ENDPOINT_URL: they are for others, who pass them on in a spec.


@pytest.fixture
def s3(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """A fresh bucket, and an environment that names it and who may use it.

    In an S3 that is there already, a fresh prefix, and who may use it is said already.
    """
    is_given = s3_server.GIVEN or request.path.stem in ON_MOTO
    backend = "s3_backend" if is_given else "small_s3_backend"
    with _at_s3(request.getfixturevalue(backend), monkeypatch) as place:
        yield place


@pytest.fixture
def small_s3(
    small_s3_backend: small_s3_server.Store, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    with _at_s3(small_s3_backend, monkeypatch) as place:
        yield place


@pytest.fixture
def gcs(
    gcs_backend: gcs_server.Store, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """A fresh bucket, and an environment in which "gs://" leads there."""
    with _place("gs", gcs_backend) as place:
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "testing")
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", place.endpoint)
        yield place


@pytest.fixture(params=["s3", "gcs"])
def place(request: pytest.FixtureRequest) -> Place:
    """A fresh bucket in each kind of store."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer is given up at once, not in half a minute."""
    from support import publication, store_patience, tensorstore_calls

    retries = {"max_retries": 3, "initial_delay": "1ms", "max_delay": "1ms"}
    monkeypatch.setattr(tensorstore_calls, "_RETRIES", retries)
    monkeypatch.setattr(tensorstore_calls, "_contexts", {})
    monkeypatch.setattr(store_patience, "_silent", set())
    monkeypatch.setattr(publication, "PAUSES", (0.001,) * 3)


@contextlib.contextmanager
def _at_s3(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with _place("s3", backend) as place:
        if not s3_server.GIVEN:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_REGION", s3_server.REGION)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL", place.endpoint)
        monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
        yield place


@contextlib.contextmanager
def _place(scheme: str, backend: Any) -> Iterator[Place]:
    name = f"bucket-{next(_NUMBERS)}"
    bucket, prefix = name, ""
    if isinstance(backend, s3_server.Given):
        bucket, prefix = backend.bucket, f"{name}-{os.getpid()}/"
    else:
        backend.make_bucket(bucket)
    proxy = Proxy(backend)
    yield Place(bucket, f"{scheme}://{bucket}/{prefix}run", proxy)
    proxy.stop()
