"""What the children of the zygote do in the directory of a run, with a manager."""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import eqx_ckpt

from . import shim, workloads


def save(
    directory: str,
    step: int,
    keep: int,
    seed: int | None = None,
    layout: eqx_ckpt.typing.Layout = "zarr",
    incremental: bool = False,
) -> None:
    """Start a manager, and save one step; instead of the same one, if it is damaged."""
    tree = workloads.tree(step if seed is None else seed)
    with eqx_ckpt.CheckpointManager(
        directory,
        keep=eqx_ckpt.keep_last(keep),
        layout=layout,
        incremental=incremental,
    ) as manager:
        if step in manager.steps():
            manager.restore(workloads.tree(0), on_damage="fallback")
        with workloads.small_chunks():
            manager.save(step, tree).result()
        shim.note("saved")


def delete(directory: str, step: int) -> None:
    """Delete a step."""
    with eqx_ckpt.CheckpointManager(directory) as manager:
        manager.delete(step)
    shim.note("deleted")


def start(directory: str) -> None:
    """Start a manager, which cleans up."""
    shim.note("starting")
    eqx_ckpt.CheckpointManager(directory)
    shim.note("started")


def save_beside_a_fork(directory: str, step: int) -> None:
    """Save a step; a child that is forked amid that lives until the directory goes."""

    def report(phase: str, leaf: str, done: int, total: int) -> None:
        if phase == "commit" and os.fork() == 0:
            signal.alarm(60)
            _close_pipes()
            while os.path.exists(directory):
                time.sleep(0.05)
            os._exit(0)

    with eqx_ckpt.CheckpointManager(directory, progress=report) as manager:
        manager.save(step, workloads.tree(step)).result()


def _close_pipes() -> None:
    """Nobody waits for the end of them any more."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            kind = os.readlink(f"/proc/self/fd/{descriptor}").split(":")[0]
            if kind in ("pipe", "socket"):
                os.close(int(descriptor))


def restore(directory: str, step: int | None = None) -> int:
    """The seed of a step, or of the newest one."""
    manager = eqx_ckpt.CheckpointManager(directory)
    return manager.restore(workloads.tree(0), step)["step"]


def hidden(directory: str) -> set[str]:
    return {name for name in os.listdir(directory) if name.startswith(".")}


class Struck(NamedTuple):
    """What a fault has done to a call."""

    error: Exception | None
    found: dict[str, int | None]
    debris: set[str]
    warnings: list[str]  # from the log
    directory: str
    hits: list[str] = []  # "kind path" of the operations

    @property
    def kind(self) -> str:
        """The kind of the first operation that was hit, or ''."""
        return self.hits[0].split(" ", 1)[0] if self.hits else ""


def strike(function: Callable[..., None], directory: str, *args: Any) -> Struck:
    """Call a function, and look at what is there without faults."""
    error, warnings = None, []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("eqx_ckpt").addHandler(handler)
    try:
        function(directory, *args)
    except Exception as e:
        error = e
    shim.disarm()
    logging.getLogger("eqx_ckpt").removeHandler(handler)
    found = workloads.load_all(directory)
    return Struck(error, found, hidden(directory), warnings, directory)


def strike_each(
    function: Callable[..., None], template: str, fault: shim.Fault, *args: Any
) -> list[Struck]:
    """Call a function in one copy of a directory after the other.

    The fault hits the first operation below the first copy, the second one below the
    second, and so on. In the last copy there is no such operation. The copies stay.
    """
    struck: list[Struck] = []
    for n in range(1, 1000):
        directory = shutil.copytree(template, f"{template} {n}")
        report = os.memfd_create("report")
        shim.arm(dataclasses.replace(fault, root=directory, nth=n), report)
        one = strike(function, directory, *args)
        text = os.pread(report, os.fstat(report).st_size, 0)
        os.close(report)
        hits = text.decode(errors="surrogateescape").splitlines()
        struck.append(one._replace(hits=hits))
        if not hits:
            return struck
    raise AssertionError("Nothing here needs a thousand operations.")


def each(function: Callable[..., Any], directories: list[str], *args: Any) -> list[Any]:
    """What a function returns in one directory after the other."""
    return [_in(function, directory, *args) for directory in directories]


def _in(function: Callable[..., Any], directory: str, *args: Any) -> Any:
    try:
        return function(directory, *args)
    except Exception as e:
        e.add_note(f"In {directory}.")
        raise


METHODS: dict[str, Callable[[eqx_ckpt.CheckpointManager], object]] = {
    "save": lambda manager: manager.save(10**6, workloads.tree(0)),
    "wait": lambda manager: manager.wait(),
    "close": lambda manager: manager.close(),
    "with": lambda manager: manager.__exit__(None, None, None),
}


def save_and_look_away(
    directory: str, step: int, keep: int, method: str, fault: shim.Fault
) -> Exception | None:
    """What is raised by a call after a save that the fault has struck."""
    manager = eqx_ckpt.CheckpointManager(directory, keep=eqx_ckpt.keep_last(keep))
    shim.arm(fault, -1)
    concurrent.futures.wait([manager.save(step, workloads.tree(step))])
    shim.disarm()
    try:
        METHODS[method](manager)
    except OSError as e:
        manager.close()  # which is not told again
        return e
    return None


class Resumed(NamedTuple):
    """What a process that resumes a run finds, and leaves."""

    found: dict[str, int | None]
    debris: set[str]  # after the start of the manager
    restored: int  # 0: nothing
    later: dict[str, int | None]  # after one more step
    later_debris: set[str]


def resume(directory: str, keep: int) -> Resumed:
    """Look, start a manager, restore the newest step, and save the one after it."""
    found = workloads.load_all(directory)
    with eqx_ckpt.CheckpointManager(
        directory, keep=eqx_ckpt.keep_last(keep)
    ) as manager:
        debris = hidden(directory)
        assert [f"{step:06d}" for step in manager.steps()] == [*found]
        restored = 0
        if found:
            restored = manager.restore(workloads.tree(0), on_damage="fallback")["step"]
        with workloads.small_chunks():
            manager.save(restored + 1, workloads.tree(restored + 1)).result()
    return Resumed(
        found, debris, restored, workloads.load_all(directory), hidden(directory)
    )
