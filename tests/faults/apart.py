"""Jobs whose processes have disks of their own; each function runs in all of them."""

import ctypes
import os
import pathlib
import shutil
from typing import Any

import jax

import eqx_ckpt

from .failing_jobs import caught, state
from .programs import assert_same, TIMEOUT


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
