"""Sweeps of a run in a store go on beside its saves."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager
from helpers import assert_same
from stores import proxy
from stores.fixtures import Clock
from stores.place import Place
from stores.values import bucket_at
from support import heartbeat, run_sweeps, store_at


pytestmark = pytest.mark.once


# Seconds; longer than anything here takes.
TIMEOUT = 120.0
LEFT = "000009/@" + "f" * 32


def state(step: int) -> dict[str, object]:
    return {"w": np.full(3, step), "step": step}


def is_left(run: str) -> bool:
    keys = [key.decode() for key in store_at(run).list().result()]
    return any(key.startswith(LEFT) for key in keys)


class Held:
    """The requests of a sweep about a dead attempt, held until they may go on."""

    def __init__(self, place: Place) -> None:
        self.has_come, self.go_on = threading.Event(), threading.Event()
        place.proxy.add(self, "GET", r"^[^?]*000009(?:/|%2F)zarr")

    def __call__(self, exchange: proxy.Exchange) -> None:
        self.has_come.set()
        assert self.go_on.wait(TIMEOUT)
        proxy.passed(exchange)


@pytest.fixture
def run(place: Place, clock: Clock) -> Iterator[tuple[CheckpointManager, Held]]:
    """A manager whose next sweep asks about a dead attempt, and waits."""
    bucket_at(place.url).write(f"{LEFT}/w/c.0", b"left")
    manager = CheckpointManager(place.url)
    clock.now += heartbeat.ORPHANED_AFTER + 1
    held = Held(place)
    yield manager, held
    held.go_on.set()
    manager.close()


def test_a_sweep_holds_up_no_save(
    place: Place, run: tuple[CheckpointManager, Held]
) -> None:
    manager, held = run
    manager.save(1, state(1)).result(TIMEOUT)
    assert held.has_come.wait(TIMEOUT)
    # Nor the next one, which begins no other sweep.
    manager.save(2, state(2)).result(TIMEOUT)
    assert manager.steps() == [1, 2]
    assert_same(manager.restore(state(0)), state(2))
    assert is_left(place.url)
    held.go_on.set()
    manager.wait()
    assert not is_left(place.url)
    assert manager.steps() == [1, 2]


def test_close_ends_a_sweep(
    place: Place,
    run: tuple[CheckpointManager, Held],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, held = run
    manager.save(1, state(1)).result(TIMEOUT)
    assert held.has_come.wait(TIMEOUT)
    monkeypatch.setattr(run_sweeps, "PATIENCE", 0.0)
    manager.close()
    held.go_on.set()
    for thread in threading.enumerate():
        if thread.name == f"eqx_ckpt sweeps {place.url}":
            thread.join(TIMEOUT)
    # The rest is left to another manager.
    assert is_left(place.url)
    eqx_ckpt.inspect.verify(f"{place.url}/000001")


def test_a_sweep_that_fails_is_no_failure_of_a_save(
    place: Place,
    run: tuple[CheckpointManager, Held],
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager, held = run
    held.go_on.set()
    place.proxy.rules[:] = []
    place.proxy.add(proxy.answered(403), "GET", r"^[^?]*000009(?:/|%2F)zarr")
    manager.save(1, state(1)).result(TIMEOUT)
    manager.wait()
    assert "Could not clean up" in caplog.text
    assert "denies" in caplog.text
    assert is_left(place.url)
    assert manager.steps() == [1]
