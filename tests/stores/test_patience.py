"""A store that dies, freezes, or is only slow: how long it is waited for."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager
from stores import frozen, proxy
from stores.place import Place
from support import store_patience as patience, tensorstore_calls as kvstore


pytestmark = pytest.mark.once


pytest_plugins = ["stores.fixtures"]
STATE = {"w": jnp.arange(6.0), "b": np.ones(3), "step": 1}
# Seconds. TensorStore alone needs more than that for each of several requests.
BOUND = 30.0


def hurry(seconds: float = 0.5) -> None:
    """A silent store is given up after twice that."""
    patience.PROBE_AFTER = patience.LAST_PATIENCE = seconds


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is said: this machine may be slow."""
    monkeypatch.setattr(patience, "_silent", set())
    monkeypatch.setattr(patience, "PROBE_AFTER", BOUND)
    monkeypatch.setattr(patience, "LAST_PATIENCE", BOUND)


@pytest.fixture(scope="module")
def server() -> Iterator[frozen.Server]:
    server = frozen.Server()
    yield server
    server.stop()


@pytest.fixture
def run(
    server: frozen.Server, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Iterator[str]:
    """A run with steps 1 and 2 in a server that can be frozen."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.url,
    }.items():
        monkeypatch.setenv(name, value)
    run = f"s3://{server.bucket}/{request.node.name}"
    with CheckpointManager(run) as manager:
        for step in (1, 2):
            manager.save(step, STATE, metadata={"loss": step})
    yield run
    server.thaw()


def freeze(server: frozen.Server) -> None:
    server.freeze()
    hurry()


def thaw(server: frozen.Server) -> None:
    server.thaw()
    hurry(BOUND)


def given_up(call: Callable[[], Any]) -> BaseException:
    """What a call raises, in time."""
    begin = time.monotonic()
    with pytest.raises((TimeoutError, ConnectionError)) as raised:
        call()
    assert time.monotonic() - begin < BOUND
    return raised.value


@pytest.mark.once
@pytest.mark.parametrize(
    "ask",
    ["steps", "latest", "best", "restore", "save", "verify", "start", "overwrite"],
)
def test_a_store_that_froze_before(server, run: str, ask: str) -> None:
    manager = CheckpointManager(run)
    step = f"{run}/000002"
    calls: dict[str, Callable[[], Any]] = {
        "steps": manager.steps,
        "latest": manager.latest,
        "best": lambda: manager.best("loss"),
        "restore": lambda: manager.restore(STATE, 1),
        "save": lambda: manager.save(3, STATE),
        "verify": lambda: eqx_ckpt.inspect.verify(step),
        "start": lambda: CheckpointManager(run).latest(),
        "overwrite": lambda: eqx_ckpt.tree_serialise_leaves(
            step, STATE, overwrite=True
        ),
    }
    freeze(server)
    given_up(calls[ask])
    thaw(server)
    assert manager.steps() == [1, 2]


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
@pytest.mark.parametrize("at", ["write", "commit"])
def test_a_store_that_freezes_in_a_save(server, run: str, at: str, layout) -> None:
    def freezing(phase: str, *_: object) -> None:
        if phase == at:
            freeze(server)

    manager = CheckpointManager(run, layout=layout, progress=freezing)
    error = given_up(lambda: manager.save(3, STATE).result())
    notes = "".join(getattr(error, "__notes__", ()))
    assert ("is not known" in notes) == (at == "commit")
    thaw(server)
    with CheckpointManager(run, layout=layout) as later:
        if at == "write":
            assert later.steps() == [1, 2]
        later.save(4, STATE).result()
        assert later.latest() == 4


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_a_store_that_freezes_in_a_restore(server, run: str, layout) -> None:
    def freezing(f: Any, leaf: Any) -> Any:
        freeze(server)
        return eqx_ckpt.default_deserialise_filter_spec(f, leaf)

    eqx_ckpt.tree_serialise_leaves(f"{run}/000003", STATE, layout=layout)
    given_up(lambda: CheckpointManager(run).restore(STATE, 3, freezing))


def test_a_slow_request_is_waited_for(place: Place, monkeypatch) -> None:
    """As long as the store answers another one meanwhile."""
    asked = threading.Event()

    def wait(exchange: proxy.Exchange) -> None:
        assert asked.wait(BOUND)
        proxy.passed(exchange)

    place.proxy.add(wait, path=r"(?:/|%2F)c\.")
    monkeypatch.setattr(patience, "PROBE_AFTER", 0.1)
    ask = patience._ask

    def spied(*args: Any) -> None:
        ask(*args)
        asked.set()

    monkeypatch.setattr(patience, "_ask", spied)
    eqx_ckpt.tree_serialise_leaves(place.url, STATE)
    asked.clear()
    restored = eqx_ckpt.tree_deserialise_leaves(place.url, STATE)
    assert asked.is_set()
    assert restored["w"].tolist() == STATE["w"].tolist()


@pytest.mark.once
@pytest.mark.parametrize("overwrite", [False, True])
def test_no_request_comes_after_it_was_given_up(
    place: Place, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """A store that is well again is not told to commit what has failed."""
    retries = {"max_retries": 99, "initial_delay": "200ms", "max_delay": "200ms"}
    monkeypatch.setattr(kvstore, "_RETRIES", retries)
    monkeypatch.setattr(kvstore, "_contexts", {})
    if overwrite:
        eqx_ckpt.tree_serialise_leaves(place.url, STATE)

    def die(phase: str, *_: object) -> None:
        if phase == "commit":
            place.proxy.add(proxy.answered(503))
            hurry()

    state = {**STATE, "step": 2}
    error = given_up(
        lambda: eqx_ckpt.tree_serialise_leaves(
            place.url, state, overwrite=overwrite, progress=die
        )
    )
    assert "is not known" in "".join(error.__notes__)
    before = len(place.proxy.requests)
    time.sleep(1.0)  # Five times what there was between two requests.
    late = [r for r in place.proxy.requests[before:] if r.method in ("PUT", "POST")]
    assert len(late) <= 1  # One may have been on its way.
