"""Jobs in which something goes wrong; each function runs in all of their processes."""

import errno
import functools as ft
import logging
import os
import pathlib
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import eqx_ckpt
from support import (
    ChunkFiles,
    directory_place as storage,
    DirectorySteps,
    jax_service as coordination,
    opening,
    posix_calls,
)

from .programs import (
    assert_same,
    mesh,
    restore,
    save,
    shared,
    SPECS,
    TIMEOUT,
    value,
)


def caught(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The type and the text of what a call raises."""
    try:
        call(*args, **kwargs)
    except Exception as e:
        notes = getattr(e, "__notes__", [])
        return type(e).__name__, "\n".join([str(e), *notes])
    return "", ""


def state(step: int, spec: P = SPECS["both"]) -> dict[str, Any]:
    """A small tree."""
    data = value("both") + step
    return {
        "w": shared(data, NamedSharding(mesh(), spec)),
        "same": shared(data, NamedSharding(mesh(), P())),
        "numpy": np.arange(4) + step,
        "step": step,
    }


class Case(NamedTuple):
    """What a process raised, in how many seconds, and what process 0 found then."""

    kind: str
    text: str
    seconds: float
    entries: list[str]


Save = Callable[..., Any]


def attempt(directory: str, name: str, save: Save, *args: Any, **kwargs: Any) -> Case:
    """What comes of a save; the next one then has to work."""
    begin = time.monotonic()
    kind, text = caught(save, *args, **kwargs)
    seconds = time.monotonic() - begin
    after = f"{directory}/after {name}"
    eqx_ckpt.tree_serialise_leaves(after, state(1), timeout=TIMEOUT)
    entries = os.listdir(directory) if jax.process_index() == 0 else []
    return Case(kind, text, seconds, [e for e in entries if not e.startswith("after")])


def disagree(directory: str) -> dict[str, Case]:
    """Saves of which process 1 wants something else than process 0."""
    other = jax.process_index() == 1
    good = state(1)
    changes: dict[str, dict[str, Any]] = {
        "more": {"zz": 1},
        "shape": {"numpy": np.arange(5)},
        "dtype": {"numpy": np.arange(4.0)},
        "sharding": state(1, P("y", "x")),
        "impossible": {"numpy": jax.ShapeDtypeStruct((4,), np.int64)},
    }
    cases: dict[str, Case] = {}

    def check(name: str, tree: Any, path: str, **kwargs: Any) -> None:
        save = ft.partial(eqx_ckpt.tree_serialise_leaves, timeout=TIMEOUT, **kwargs)
        cases[name] = attempt(directory, name, save, path, tree)

    for name, change in changes.items():
        check(name, good | change if other else good, f"{directory}/new")
    # Each takes it for a leaf of the other one.
    device = SingleDeviceSharding(jax.devices()[-1 if jax.process_index() == 0 else 0])
    check("place", good | {"one": shared(np.arange(4), device)}, f"{directory}/new")
    check("path", good, f"{directory}/{'other' if other else 'new'}")
    check("overwrite", good, f"{directory}/new", overwrite=other)
    check("layout", good, f"{directory}/new", layout="ocdbt" if other else "zarr")
    check("compression", good, f"{directory}/new", compression=other and "zstd" or None)
    check("exists", good, f"{directory}/after path")
    check("memory", good, "memory://new")
    manager = eqx_ckpt.CheckpointManager(f"{directory}/after run", timeout=TIMEOUT)

    for name, steps in {"step": (1, 2), "no step": (3, -3)}.items():

        def save_step(step: int = steps[other]) -> None:
            manager.save(step, good).result()

        cases[name] = attempt(directory, name, save_step)
    return cases


def _elsewhere(directory: str) -> Callable[..., int]:
    """`open_folder` of a machine on which a directory is another one."""

    def opened(path: str, **how: bool) -> int:
        return opening.open_folder(path.replace(directory, "/nowhere"), **how)

    return opened


def _swapped(elsewhere: str) -> Callable[..., int]:
    """`open_folder` while somebody else has put a directory at the path."""

    def opened(path: str, **how: bool) -> int:
        os.mkdir(elsewhere)
        posix_calls.exchange(path, elsewhere)
        try:
            return opening.open_folder(path, **how)
        finally:
            posix_calls.exchange(path, elsewhere)

    return opened


def fail(directory: str) -> dict[str, Case]:
    """Saves that fail on one process only, in different phases."""
    first, good = jax.process_index() == 0, state(1)
    cases: dict[str, Case] = {}

    def check(name: str, place: Any, attribute: str, broken: Any, here: bool) -> None:
        whole = getattr(place, attribute)
        save = ft.partial(_save_broken, place, attribute, broken if here else whole)
        cases[name] = attempt(directory, name, save, f"{directory}/new", good)

    check("not shared", storage, "open_folder", _elsewhere(directory), not first)
    elsewhere = f"{directory}-elsewhere"
    check("swapped", storage, "open_folder", _swapped(elsewhere), not first)
    if not first:
        os.rmdir(elsewhere)  # Nothing was written there.
    check("disk full", ChunkFiles, "write", _raising(errno.ENOSPC), not first)
    check("first full", ChunkFiles, "write", _raising(errno.ENOSPC), first)
    check("flush", storage, "flush", _raising(errno.EIO), not first)
    check("begin", os, "mkdir", _raising(errno.EACCES), first)
    check("rename", os, "rename", _raising(errno.EIO), first)
    return cases


def _save_broken(place: Any, attribute: str, value: Any, path: str, tree: Any) -> None:
    whole = getattr(place, attribute)
    setattr(place, attribute, value)
    try:
        eqx_ckpt.tree_serialise_leaves(path, tree, timeout=TIMEOUT)
    finally:
        setattr(place, attribute, whole)


def _raising(error: int | Exception) -> Callable[..., Any]:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError(error, os.strerror(error)) if isinstance(error, int) else error

    return broken


def unseen(directory: str) -> dict[str, Case]:
    """A save in the background fails; process 1 looks at its future, 0 does not."""
    first, good = jax.process_index() == 0, state(1)
    whole = ChunkFiles.write
    if not first:
        ChunkFiles.write = _raising(errno.ENOSPC)
    save = ft.partial(eqx_ckpt.tree_serialise_leaves_async, timeout=TIMEOUT)
    saving = save(f"{directory}/new", good)
    wait([saving])
    ChunkFiles.write = whole
    if not first:
        saving.exception()

    def save_and_look() -> None:
        save(f"{directory}/new", good).result()

    return {"unseen": attempt(directory, "unseen", save_and_look)}


def fail_to_remove(directory: str) -> tuple[dict[int, tuple[str, str]], list[int]]:
    """Process 0 cannot remove an old step; the run goes on."""
    keep, timeout = eqx_ckpt.keep_last(1), TIMEOUT
    manager = eqx_ckpt.CheckpointManager(directory, keep=keep, timeout=timeout)
    manager.save(1, state(1)).result()
    whole = DirectorySteps.remove
    if jax.process_index() == 0:
        DirectorySteps.remove = _raising(errno.EIO)
    errors = {2: caught(manager.save(2, state(2)).result)}
    manager.save(3, state(3))
    errors[3] = caught(manager.wait)
    DirectorySteps.remove = whole
    manager.save(4, state(4)).result()
    return errors, manager.steps()


def give_up_on_a_deletion(directory: str) -> tuple[tuple[str, str], list[int]]:
    """Process 1 waits no longer while process 0 deletes."""
    begun, given_up = (pathlib.Path(directory, name) for name in ("begun", "given up"))
    run = f"{directory}/run"
    manager = eqx_ckpt.CheckpointManager(run, timeout=TIMEOUT)
    for step in (1, 2):
        manager.save(step, state(step)).result()
    remove, wait = DirectorySteps.remove, coordination.Service.wait

    def removed(steps: DirectorySteps, which: Sequence[int]) -> None:
        remove(steps, which)
        begun.touch()
        while not given_up.exists():
            time.sleep(0.01)

    def impatient(service: coordination.Service, key: str, seconds: float) -> Any:
        while (found := wait(service, key, 0.1)) is None and not begun.exists():
            pass
        return found

    if jax.process_index() == 0:
        DirectorySteps.remove = removed
    else:
        coordination.Service.wait = impatient
    raised = caught(manager.delete, 1)
    given_up.touch()
    DirectorySteps.remove, coordination.Service.wait = remove, wait
    manager.save(3, state(3)).result()
    return raised, manager.steps()


def in_the_background(directory: str) -> None:
    """Several saves at once, of arrays that are donated afterwards, and a busy main."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    write_arrays = ChunkFiles.write

    go_on = threading.Event()

    def slowly(*args: Any, **kwargs: Any) -> Any:
        go_on.wait(TIMEOUT)
        return write_arrays(*args, **kwargs)

    if jax.process_index() == 0:
        ChunkFiles.write = slowly
    manager = eqx_ckpt.CheckpointManager(f"{directory}/run", timeout=TIMEOUT)
    array, savings = state(0)["w"], []
    save = ft.partial(eqx_ckpt.tree_serialise_leaves_async, timeout=TIMEOUT)
    for n in range(4):
        savings.append(save(f"{directory}/{n}", {"w": array}))
        array = step(array)
    for _ in range(30):  # Each of these is an agreement too.
        assert not manager.should_save(0)
    assert not any(saving.done() for saving in savings)
    go_on.set()
    for n, saving in enumerate(savings):
        saving.result()
        like = {"w": state(n)["w"]}
        assert_same(eqx_ckpt.tree_deserialise_leaves(f"{directory}/{n}", like), like)
    assert not manager.should_save(0)
    if jax.process_index() == 0:
        # It has let the service forget all but the last agreement.
        remembered = coordination._client().key_value_dir_get("eqx_ckpt/")
        assert len(remembered) < 10, remembered
    manager.close()


def train(directory: str) -> dict[str, Any]:
    """A run with retention; damage that only one process meets; SIGTERM to one."""
    is_first, keep = jax.process_index() == 0, eqx_ckpt.keep_last(2)
    run = eqx_ckpt.CheckpointManager(directory, keep=keep, timeout=TIMEOUT)
    assert run.latest() is None
    saved: list[list[int]] = []
    for step in range(1, 5):
        saving = run.save(step, state(step), metadata={"loss": 1 / step})
        if step != 2:
            saving.result()
            saved.append(run.steps())
    seen: dict[str, Any] = {"after saving": saved}
    seen |= {"latest": run.latest(), "best": run.best("loss")}
    assert_same(run.restore(state(0)), state(4))
    if is_first:
        # Process 0 has none of these rows.
        chunk = pathlib.Path(directory, "000004", "w", "c.3.0")
        chunk.write_bytes(bytes(chunk.stat().st_size))
    assert not run.should_save(5)
    seen["damaged"] = caught(run.restore, state(0))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert_same(run.restore(state(0), on_damage="fallback"), state(3))
    seen["fallback"] = [str(warning.message) for warning in warned]
    run.save(4, state(4)).result()
    assert_same(run.restore(state(0)), state(4))
    like = state(0) | ({} if is_first else {"more": 1})
    seen["another tree"] = caught(run.restore, like)
    if not is_first:
        os.kill(os.getpid(), signal.SIGTERM)
    assert run.should_save(5)
    run.save(5, state(5))
    assert not run.should_save(5)
    run.close()
    return seen | {"at the end": run.steps()}


def read_once_what_is_damaged(path: str) -> tuple[str, str]:
    """Only process 0 reads the damaged leaf, and would send it to the others."""
    eqx_ckpt.tree_serialise_leaves(path, state(1), timeout=TIMEOUT)
    if jax.process_index() == 0:
        chunk = pathlib.Path(path, "same", "c.0.0")
        chunk.write_bytes(bytes(chunk.stat().st_size))
    eqx_ckpt.tree_serialise_leaves(f"{path}-2", state(2), timeout=TIMEOUT)
    read = ft.partial(
        eqx_ckpt.tree_deserialise_leaves, like=state(0), broadcast_replicas=True
    )
    assert_same(read(f"{path}-2"), state(2))
    return caught(read, path)


def without_a_service(directory: str) -> list[Any]:
    """As on a JAX that has no coordination service that we know."""
    coordination._client = lambda: None
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("eqx_ckpt").addHandler(handler)
    save(f"{directory}/new")
    restore(f"{directory}/new")
    save(f"{directory}/async", asynchronous=True)
    other = jax.process_index() == 1
    bad = state(1) | ({"zz": 1} if other else {})
    errors = [
        caught(eqx_ckpt.tree_serialise_leaves, f"{directory}/bad", bad),
        caught(eqx_ckpt.tree_serialise_leaves, f"{directory}/new", state(1)),
    ]
    with eqx_ckpt.CheckpointManager(f"{directory}/run") as run:
        run.save(1, state(1))
        assert not run.should_save(2)
        assert_same(run.restore(state(0)), state(1))
    return [said, *errors, sorted(os.listdir(directory))]


def survive_a_full_disk(run: str) -> list[tuple[bool, str, str]]:
    """For each save, whether the call itself or its future raised, and what.

    Of these, only the first and the fourth one fit.
    """
    found: list[tuple[bool, str, str]] = []
    manager = eqx_ckpt.CheckpointManager(
        run,
        keep=eqx_ckpt.keep_last(1),
        on_error="warn",
        max_failures=2,
        timeout=TIMEOUT,
    )
    for step, rows in enumerate((1, 80, 80, 2, 80, 80, 80, 3)):
        sharding = NamedSharding(mesh(), P("x"))
        tree = {"w": shared(np.full((16, rows * 300), step), sharding)}
        futures: list[Any] = []
        kind, text = caught(lambda: futures.append(manager.save(step, tree)))  # noqa: B023
        if futures:
            kind, text = caught(futures[0].result)
        found.append((not futures, kind, text))
    found.append((True, *caught(manager.close)))
    assert manager.latest() == 3
    return found
