"""Jobs of which a process dies, hangs or is late; run in all of their processes."""

import functools as ft
import itertools
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

import eqx_ckpt
from support import (
    ChunkFiles,
    ChunkValues,
    joint_attempt as joint,
    meeting,
    process_group as group,
)

from .failing_jobs import attempt, caught, state
from .jobs import End
from .programs import assert_same, hidden, TIMEOUT


# Instead of five seconds.
TIMEOUT_MARGIN = 0.5
POINTS = (
    "before the plan",
    "after the plan",
    "after the begin",
    "amid the writes",
    "after the writes",
    "before the commit",
    "after the commit",
)


def arm(point: str, act: Callable[[], Any]) -> None:
    """Let this process do something at a point of its next save."""
    attempt, is_first = joint.JointAttempt, jax.process_index() == 0
    if point == "amid the writes":
        _amid(act)
        return
    owner, name, is_before = {
        "before the plan": (attempt, "agree", True),
        "after the plan": (attempt, "agree", False),
        "after the begin": (attempt, "_begin", False),
        "after the writes": (attempt, "gather", True),
        "before the commit": (attempt, "gather", False),
        "after the commit": (attempt, "_publish" if is_first else "commit", False),
    }[point]
    whole = getattr(owner, name)

    def acting(*args: Any) -> Any:
        setattr(owner, name, whole)
        if is_before:
            act()
        value = whole(*args)
        if not is_before:
            act()
        return value

    setattr(owner, name, acting)


def _amid(act: Callable[[], Any]) -> None:
    """Act once some of the pieces are on the disk, or some of the objects there."""
    write_files, write_values = ChunkFiles.write, ChunkValues.write

    def acting(pieces: Iterator[Any]) -> Iterator[Any]:
        yield from itertools.islice(pieces, 1)
        time.sleep(0.1)
        act()
        yield from pieces

    def write(chunks: Any, arrays: Any, pieces: Any, *args: Any, **kwargs: Any) -> Any:
        ChunkFiles.write = write_files
        return write_files(chunks, arrays, acting(iter(pieces)), *args, **kwargs)

    def write_some(
        chunks: Any, arrays: Any, pieces: Any, *args: Any, **kwargs: Any
    ) -> Any:
        ChunkValues.write = write_values
        pieces, name = [*pieces], next(iter(arrays))
        known: dict[str, Any] = {}
        for is_now in (True, False):
            some = {n: record for n, record in arrays.items() if (n == name) is is_now}
            of_some = [piece for piece in pieces if piece.name in some]
            known |= write_values(chunks, some, of_some, *args, **kwargs)
            if is_now:
                act()
        return known

    ChunkFiles.write, ChunkValues.write = write, write_some


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(
    directory: str,
    who: int,
    point: str,
    timeout: float,
    layout: eqx_ckpt.typing.Layout = "zarr",
) -> tuple[str, str, float]:
    """Save step 1; then one process is killed while all of them save step 2."""
    act = die if jax.process_index() == who else None
    return _save_two(directory, point, act, timeout, layout)


def _save_two(
    directory: str,
    point: str,
    act: Callable[[], Any] | None,
    timeout: float,
    layout: eqx_ckpt.typing.Layout = "zarr",
) -> tuple[str, str, float]:
    save = ft.partial(eqx_ckpt.tree_serialise_leaves, layout=layout)
    save(f"{directory}/000001", state(1), timeout=TIMEOUT)
    if act is not None:
        arm(point, act)
    begin = time.monotonic()
    error = caught(save, f"{directory}/000002", state(2), timeout=timeout)
    return *error, time.monotonic() - begin


def check_ends(ends: list[End], who: int, point: str, seconds: float) -> bool:
    """Of two processes, one was killed: whether the save was to succeed all the same.

    The other one knows how it ended, or names the dead one.
    """
    assert ends[who].signal == signal.SIGKILL, (point, ends)
    survivor = ends[1 - who]
    saved = point == "after the commit" or (who, point) == (1, "before the commit")
    if who == 0:
        # JAX's coordination service died with it: JAX ends its clients at once.
        assert survivor.value is None or survivor.value[0] or saved, point
    elif saved:
        assert survivor.value[0] == "", point
    else:
        check_names(survivor, who, seconds, point)
        assert f"No answer from process {who} of {len(ends)}" in survivor.value[1]
    return saved


def check_names(end: End, who: int, seconds: float, where: str) -> None:
    """That a process says in time who is dead or late."""
    assert not end.error, (where, end.error)
    kind, text, passed = end.value
    assert kind == "CheckpointError", where
    assert text.startswith(f"No answer from process {who} of "), where
    assert passed < seconds + 30, where


def save_and_hang(
    directory: str, who: int, point: str, timeout: float
) -> tuple[str, str, float]:
    """As `save_and_die`, but it dies only when the other one has given up."""
    meeting.TIMEOUT_MARGIN = group.TIMEOUT_MARGIN = TIMEOUT_MARGIN
    dead = jax.process_index() == who
    given_up = pathlib.Path(f"{directory}.given-up")

    def hang() -> None:
        wait_for([given_up])
        time.sleep(2)  # JAX ends the other one too: what it found is on its way.
        die()

    outcome = _save_two(directory, point, hang if dead else None, timeout)
    given_up.touch()
    return outcome


def wait_for(files: Iterable[pathlib.Path]) -> None:
    """Until other processes have made them."""
    while not all(file.exists() for file in files):
        time.sleep(0.01)


def die_while_first_is_late(
    directory: str, who: int, timeout: float
) -> tuple[str, str, float]:
    """One process dies; process 0 comes later than the others would wait for it."""
    meeting.TIMEOUT_MARGIN = group.TIMEOUT_MARGIN = TIMEOUT_MARGIN
    acts = {0: ft.partial(time.sleep, 2 * TIMEOUT_MARGIN), who: die}
    act = acts.get(jax.process_index())
    return _save_two(directory, "before the plan", act, timeout)


def be_late(directory: str, who: int, timeout: float) -> dict[str, Any]:
    """One process comes when the other has given up, at each of two points.

    The next save works.
    """
    meeting.TIMEOUT_MARGIN = group.TIMEOUT_MARGIN = TIMEOUT_MARGIN
    found: dict[str, Any] = {}
    for point in ("before the plan", "after the begin"):
        given_up = pathlib.Path(f"{directory}/after it was given up {point}")
        if jax.process_index() == who:
            arm(point, ft.partial(wait_for, [given_up]))

        def save(path: str, tree: Any, file: pathlib.Path = given_up) -> None:
            try:
                eqx_ckpt.tree_serialise_leaves(path, tree, timeout=timeout)
            finally:
                file.touch()

        found[point] = attempt(directory, point, save, f"{directory}/new", state(1))
    return found


def resume(directory: str) -> list[int]:
    """In one process: every step is intact, and what was left over is gone."""
    with eqx_ckpt.CheckpointManager(directory) as manager:
        for step in manager.steps():
            eqx_ckpt.inspect.verify(f"{directory}/{step:06d}")
            assert_same(manager.restore(state(step), step), state(step))
        assert not hidden(directory)
        return manager.steps()
