"""What processes do at an object store that runs in the process of the tests.

Each function runs in all processes of a job; see tests/faults/jobs.py.
"""

import os
import pathlib
import signal
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import eqx_ckpt
from faults.failing_jobs import caught, state
from faults.programs import assert_same, TIMEOUT
from support import (
    heartbeat,
    KeyValues,
    publication,
    tensorstore_calls as kvstore,
)

from .place import Place
from .values import bucket_at


# Seconds after which a save fails that was stopped.
FAIL_AFTER = 0.4
_NAMES = ("AWS_", "GOOGLE_AUTH_TOKEN_FOR_TESTING", "TENSORSTORE_GCS_HTTP_URL")


def environment(place: Place) -> dict[str, str]:
    """What leads to a place, and says who may use it."""
    found = {k: v for k, v in os.environ.items() if k.startswith(_NAMES)}
    assert place.endpoint in found.values()
    return found


def at(names: Mapping[str, str], program: Callable[..., Any], *args: Any) -> Any:
    """Run a program in an environment: its process has not used TensorStore yet."""
    os.environ.update(names)
    return program(*args)


def small(step: int) -> dict[str, Any]:
    """A small tree of one process."""
    return {"w": jnp.full(3, step), "history": np.full(5, step), "step": step}


def save_and_die(run: str, layout: eqx_ckpt.typing.Layout) -> None:
    """Save step 1; then the process is killed before the commit of step 2."""

    def die(phase: str, *_: Any) -> None:
        if phase == "commit":
            os.kill(os.getpid(), signal.SIGKILL)

    with eqx_ckpt.CheckpointManager(run, layout=layout) as manager:
        manager.save(1, small(1))
    with eqx_ckpt.CheckpointManager(run, layout=layout, progress=die) as manager:
        manager.save(2, small(2))


def train(run: str, layout: eqx_ckpt.typing.Layout) -> dict[str, Any]:
    """A run with retention, and with damage that only process 1 meets."""
    options = {"layout": layout, "timeout": TIMEOUT}
    keep = eqx_ckpt.keep_last(2)
    manager = eqx_ckpt.CheckpointManager(run, keep=keep, **options)
    assert manager.latest() is None
    saved: list[list[int]] = []
    for step in range(1, 5):
        saving = manager.save(step, state(step), metadata={"loss": 1 / step})
        if step != 2:
            saving.result()
            saved.append(manager.steps())
    seen: dict[str, Any] = {"after saving": saved}
    seen |= {"latest": manager.latest(), "best": manager.best("loss")}
    assert_same(manager.restore(state(0)), state(4))
    transposed = P("y", "x")
    assert_same(manager.restore(state(0, transposed)), state(4, transposed))
    seen["again"] = caught(lambda: manager.save(4, state(9)).result())
    if layout == "zarr":
        seen["damaged"] = damage(manager, run)
    manager.save(5, state(5))
    manager.close()
    return seen | {"at the end": manager.steps()}


def damage(manager: eqx_ckpt.CheckpointManager, run: str) -> tuple[str, str]:
    """Damage a chunk of step 4 of which process 0 has none."""
    if jax.process_index() == 0:
        base = bucket_at(f"{run}/000004")
        (key,) = [k for k in base.list_keys() if k.endswith("/w/c.3.0")]
        size = len(base.read(key) or b"")
        base.write(key, bytes(size))
    assert not manager.should_save(5)  # So that all of them come after that.
    return caught(manager.restore, state(0))


def save_what_one_cannot(path: str, layout: eqx_ckpt.typing.Layout) -> tuple[str, str]:
    """The store denies something to one of the processes."""
    save = eqx_ckpt.tree_serialise_leaves
    return caught(save, path, state(1), layout=layout, timeout=TIMEOUT)


def resume(run: str, layout: eqx_ckpt.typing.Layout) -> tuple[list[int], list[int]]:
    """Every step is intact, and the run goes on."""
    options = {"layout": layout, "timeout": TIMEOUT}
    with eqx_ckpt.CheckpointManager(run, **options) as manager:
        found = manager.steps()
        for step in found:
            eqx_ckpt.inspect.verify(f"{run}/{step:06d}")
            assert_same(manager.restore(state(0), step), state(step))
        if found[-1] == 1:
            manager.save(2, state(2)).result()
        manager.save(3, state(3)).result()
        assert_same(manager.restore(state(0), 2), state(2))
        assert_same(manager.restore(state(0)), state(3))
        return found, manager.steps()


def stopping(
    operation: Callable[..., None],
    pid_file: pathlib.Path,
    clock: Callable[[], float] | None,
    run: str,
    layout: str,
) -> None:
    """Say which process this is, which will be stopped for longer than it may be."""
    pid_file.write_text(str(os.getpid()))
    heartbeat.FAIL_AFTER = FAIL_AFTER
    heartbeat.clock = clock or heartbeat.clock
    publication.PAUSES = (0.01,) * 3
    kvstore._RETRIES |= {"initial_delay": "1ms", "max_delay": "1ms"}
    operation(run, layout)


def save_to_another_store(path: str, layout: eqx_ckpt.typing.Layout) -> tuple[str, str]:
    _go_to_another_store()
    save = eqx_ckpt.tree_serialise_leaves
    return caught(save, path, state(1), layout=layout, timeout=TIMEOUT)


def record_in_another_store(path: str) -> tuple[str, str]:
    _go_to_another_store()
    return caught(eqx_ckpt.recording.Recording, path, SAMPLE, timeout=TIMEOUT)


SAMPLE = {"w": jax.ShapeDtypeStruct((3,), np.float32)}
OTHER = "other/"


def _go_to_another_store() -> None:
    """To process 1, each URL is another place, which nobody else sees."""

    def elsewhere(values: KeyValues) -> Any:
        return kvstore.open_kvstore(
            {**values.spec, "path": OTHER + values.spec["path"]}
        )

    if jax.process_index() == 1:
        KeyValues.open = elsewhere


def survive(run: str) -> list[str]:
    """What each of three saves raises, which the training survives; and what is there.

    The types are those that the processes have to agree on.
    """
    found: list[str] = []
    with eqx_ckpt.CheckpointManager(run, on_error="warn", timeout=TIMEOUT) as manager:
        for step in (1, 2, 3):
            error = manager.save(step, state(step)).exception()
            found.append(type(error).__name__)
    return [*found, *map(str, manager.steps())]
