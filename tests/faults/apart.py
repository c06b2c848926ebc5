"""Jobs whose processes have disks of their own; each function runs in all of them."""

import contextlib
import ctypes
import errno
import functools as ft
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqx_ckpt
from support import Checkpoint, directory_place as storage, part_uploads, PartAttempt

from .dying_jobs import die, wait_for
from .failing_jobs import caught, state
from .lost_parts import halves
from .programs import assert_same, mesh, TIMEOUT, tree


_CLONE_NEWNS, _MS_PRIVATE, _MS_REC = 0x20000, 1 << 18, 1 << 14


def mount_here(directory: str) -> bool:
    """Mount a disk that only this process sees; return whether that is possible."""
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWNS):
        return False
    if libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return False
    return not libc.mount(b"tmpfs", os.fsencode(directory), b"tmpfs", 0, None)


def use_one_path(directory: str) -> dict[str, Any] | None:
    """One path, at which each process has another disk; then a path that all see."""
    index, scratch = jax.process_index(), f"{directory}/scratch"
    if not mount_here(scratch):
        return None
    shared, found = f"{directory}/shared", dict[str, Any]()
    with eqx_ckpt.CheckpointManager(f"{scratch}/run", timeout=TIMEOUT) as manager:
        assert manager.latest() is None
        found["manager"] = caught(manager.save, 1, state(1))
        found["again"] = caught(manager.save, 2, state(2))
        found["steps"] = manager.steps()
    found["save"] = caught(
        eqx_ckpt.tree_serialise_leaves, f"{scratch}/new", state(1), timeout=TIMEOUT
    )
    found["left"] = [path.name for path in pathlib.Path(scratch).rglob("*")]
    with eqx_ckpt.CheckpointManager(f"{shared}/run", timeout=TIMEOUT) as manager:
        manager.save(1, state(1))
    if index == 0:  # As what is left of a run that was copied to one of the machines.
        shutil.copytree(f"{shared}/run", f"{scratch}/run", dirs_exist_ok=True)
    manager = eqx_ckpt.CheckpointManager(f"{scratch}/run", timeout=TIMEOUT)
    found["latest"] = manager.latest()
    found["restore"] = caught(manager.restore, state(0))
    found["of a step"] = caught(manager.restore, state(0), 1)
    manager = eqx_ckpt.CheckpointManager(f"{shared}/run", timeout=TIMEOUT)
    assert_same(manager.restore(state(0)), state(1))
    return found


def use_two_paths(directory: str) -> list[tuple[str, str]]:
    """Each process passes a path of its own."""
    here = f"{directory}/{jax.process_index()}"
    manager = eqx_ckpt.CheckpointManager(here, timeout=TIMEOUT)
    calls = (manager.latest, manager.restore, manager.save)
    arguments: list[tuple[Any, ...]] = [(), (state(0),), (1, state(1))]
    found = [caught(call, *a) for call, a in zip(calls, arguments, strict=True)]
    assert not os.path.exists(here)
    return found


def _manager(
    place: str, config: dict[str, Any] | None = None, **how: Any
) -> eqx_ckpt.CheckpointManager:
    """The manager of a process whose disk is that of its number."""
    return eqx_ckpt.CheckpointManager(
        f"{place}/disk{jax.process_index()}/run",
        keep=eqx_ckpt.keep_last(2),
        mirror=eqx_ckpt.Mirror(f"{place}/there", **how),
        shared=False,
        timeout=TIMEOUT,
        config=config,
    )


def everything(step: int) -> dict[str, Any]:
    return {"every": tree(mesh()), "state": state(step)}


def train(place: str, last: int) -> dict[str, Any]:
    """Go on to a step, and save each; every second one is due for the mirror."""
    read = set[str]()
    config = {"last": last, "who": jax.process_index()}
    when = eqx_ckpt.save_every_steps(2)
    with _manager(place, when=when, config=config) as manager:
        before = manager.latest()
        if before is not None:
            with _watched_reads(place, read):
                found = manager.restore(everything(0), on_damage="fallback")
            assert_same(found, everything(before))
        for step in range((before or 0) + 1, last + 1):
            manager.save(step, everything(step), metadata={"loss": step}).result()
        seen = {"latest": manager.latest(), "best": manager.best("loss")}
        # That of the first process counts, on each disk.
        assert manager.read_config() == {"last": last, "who": 0}
        here = f"{place}/disk{jax.process_index()}/run"
        assert eqx_ckpt.inspect.read_config(here) == {"last": last, "who": 0}
    seen |= {"before": before, "read": sorted(read), "uploads": [*manager.uploads()]}
    return seen | {"steps": manager.steps(), "there": manager.mirrored()}


@contextlib.contextmanager
def _watched_reads(place: str, read: set[str]) -> Generator[None]:
    """Note below which directories data are read."""
    whole = Checkpoint.read

    def spy(self: Checkpoint, *args: Any) -> Any:
        read.add(str(self).strip("'").removeprefix(f"{place}/").split("/")[0])
        return whole(self, *args)

    with mock.patch.object(Checkpoint, "read", spy):
        yield


def lose_disks(place: str) -> list[dict[str, Any]]:
    """Train; then on with a new disk in process 1, with damage in 0, and in a hurry."""
    index = jax.process_index()
    here, seen = f"{place}/disk{index}", [train(place, 3)]
    if index == 1:
        shutil.rmtree(here)
    seen.append(train(place, 4))
    chunk = pathlib.Path(here, "run/000004/shards/state/w/at0.0/c.0.0")
    if index == 0:
        chunk.write_bytes(bytes(chunk.stat().st_size))
    seen.append(train(place, 5))
    shutil.rmtree(here)
    return [*seen, train(place, 6)]


def lose_the_mirror(place: str) -> list[Any]:
    """What process 0 says of uploads to a disk that is not there at first."""
    there, index = pathlib.Path(place, "there"), jax.process_index()
    if index == 0:
        there.write_text("This is no directory.")
    with _manager(place) as manager:
        manager.save(1, state(1)).result()
        manager.save(2, state(2)).result()
        manager.wait()
        assert manager.latest() == 2
        if index == 0:
            with pytest.raises(eqx_ckpt.CheckpointError, match="is newer"):
                manager.uploads()[1].result(TIMEOUT)
            there.unlink()
        manager.latest()
    assert manager.latest() == 2
    return manager.mirrored()


def fail(place: str) -> dict[str, Any]:
    """What each process hears of what fails in one of them, and what is there then."""
    index, heard = jax.process_index(), dict[str, Any]()
    with _manager(place, when=lambda step, last: False) as manager:
        manager.save(1, state(1)).result()

        def hear(name: str, call: Callable[..., Any], *args: Any) -> None:
            heard[name] = *caught(call, *args), manager.latest()

        def save(other: Any) -> None:
            manager.save(2, other).result()

        hear("exists", manager.save, 1, state(1))
        rename = storage.os.rename
        if index == 1:
            storage.os.rename = _refuse
        hear("commit", save, state(2))
        storage.os.rename = rename
        heard["left"] = manager.steps()
        for half in range(2):
            other = state(2) | {
                "halves": halves(np.arange(4) + index * np.eye(4)[3 * half])
            }
            hear(f"half {half}", save, other)
        other = state(2) | {"numpy": np.arange(4) + index}
        hear("array", save, other)
        hear("number", manager.save, 2, state(2) | {"step": index})
        hear("sharding", manager.save, 2, state(2, P(("x", "y")[index])))
        manager.save(2, state(2)).result()
        assert_same(manager.restore(state(0)), state(2))
        hear("mesh", manager.restore, state(0, P("y", "x")))
        if index == 1:  # It is no step then.
            shutil.rmtree(f"{place}/disk1/run/000002")
        heard["lost"] = manager.latest(), manager.steps()
        assert_same(manager.restore(state(0)), state(1))
        manager.save(2, state(2)).result()
        manager.delete(1)
        heard["deleted"] = manager.latest(), manager.steps()
    same = ft.partial(eqx_ckpt.CheckpointManager, timeout=TIMEOUT, shared=False)
    heard["same"] = *caught(same, f"{place}/one"), None
    return heard


def make_room(place: str) -> list[list[str]]:
    """What each disk has when a save follows one that has failed.

    First while process 1 lacks a file of the newest step, and then when it is back.
    """
    run = pathlib.Path(f"{place}/disk{jax.process_index()}/run")
    how: dict[str, Any] = {"shared": False, "timeout": TIMEOUT}
    with eqx_ckpt.CheckpointManager(run, **how) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step)).result()
    fails = threading.Event()

    def progress(*_: Any) -> None:
        if fails.is_set():
            _refuse()

    how |= {"keep": eqx_ckpt.keep_last(1), "on_error": "warn", "max_failures": 9}
    how["progress"] = progress
    seen: list[list[str]] = []
    chunk, elsewhere = next((run / "000003").glob("**/c*")), run.parent / "chunk"
    with eqx_ckpt.CheckpointManager(run, **how) as manager:

        def fail_to_save() -> None:
            fails.set()
            assert isinstance(manager.save(4, state(4)).exception(), OSError)
            fails.clear()
            seen.append(sorted(path.name for path in run.glob("00*")))

        if jax.process_index() == 1:
            chunk.rename(elsewhere)
        fail_to_save()
        fail_to_save()
        if jax.process_index() == 1:
            elsewhere.rename(chunk)
        fail_to_save()
        manager.save(4, state(4)).result()
        assert_same(manager.restore(state(0)), state(4))
        assert manager.steps() == [4]
    return seen


def _refuse(*args: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def die_amid_an_upload(place: str, victim: int) -> tuple[float, str]:
    """One process dies while all upload their parts; how long another one waits then,
    and what it hears.
    """
    train(place, 2)
    pieces = part_uploads.pieces_of_part

    def dying(*args: Any) -> Generator[Any]:
        for number, piece in enumerate(pieces(*args)):
            if number == 2:
                die()
            yield piece

    if jax.process_index() == victim:
        part_uploads.pieces_of_part = dying
    manager = eqx_ckpt.CheckpointManager(
        f"{place}/disk{jax.process_index()}/run",
        mirror=eqx_ckpt.Mirror(f"{place}/there", timeout=5.0),
        shared=False,
        timeout=5.0,
    )
    manager.restore(everything(0))
    manager.save(3, everything(3)).result()
    start = time.monotonic()
    manager.close()
    return time.monotonic() - start, str(manager.upload_error)


def keep_slowly(place: str) -> tuple[str, list[int]]:
    """Process 0 removes steps of the mirror after process 1 has ended its upload."""
    ended = pathlib.Path(place, "ended")

    def keep(steps: Any) -> Any:
        wait_for([ended])
        return steps

    manager = eqx_ckpt.CheckpointManager(
        f"{place}/disk{jax.process_index()}/run",
        mirror=eqx_ckpt.Mirror(f"{place}/there", keep=keep),
        shared=False,
        timeout=5.0,
    )
    manager.save(1, everything(1)).result()
    manager.close()
    if jax.process_index() == 1:
        ended.touch()
    return str(manager.upload_error), manager.mirrored()


def die_amid_the_commits(place: str) -> None:
    """Process 0 has committed step 3 when both die, and process 1 has not."""
    train(place, 2)
    exchange = PartAttempt._exchange

    def die_after_the_commit(self: PartAttempt, *said: Any) -> Any:
        if self._topic == "committed":
            die()
        return exchange(self, *said)

    def die_before_the_commit(self: PartAttempt, manifest: bytes) -> None:
        wait_for([pathlib.Path(place, "disk0/run/000003")])
        die()

    if jax.process_index() == 0:
        PartAttempt._exchange = die_after_the_commit
    else:
        PartAttempt.commit = die_before_the_commit
    train(place, 3)
