"""A saver of two files, right or wrong as asked: the tools must see the wrong."""

import os
import pathlib

from . import shim


STEPS = ("sync data", "sync names", "rename", "sync parent")


def save(path: str, seed: int, leave_out: str = "") -> None:
    """Save `seed` at `path` by the textbook, but for the step `leave_out`."""
    target = pathlib.Path(path)
    attempt = target.with_name(f".{target.name}.tmp")
    if leave_out == "rename":
        attempt = target
    attempt.mkdir()
    for name in ("a", "b"):
        _write(attempt / name, bytes([seed]) * 100, sync=leave_out != "sync data")
    if leave_out != "sync names":
        _sync(attempt)
    if leave_out != "rename":
        attempt.rename(target)
    if leave_out != "sync parent":
        _sync(target.parent)
    shim.note("saved")


def check(directory: pathlib.Path, notes: list[str]) -> None:
    """What is there is intact, and it is there if the save had returned."""
    saved = directory / "new"
    if saved.exists():
        for name in ("a", "b"):
            assert (saved / name).read_bytes() == b"\2" * 100
    assert saved.exists() or "saved" not in notes, "an acknowledged save is lost"


def _write(file: pathlib.Path, data: bytes, *, sync: bool) -> None:
    descriptor = os.open(file, os.O_CREAT | os.O_WRONLY)
    os.write(descriptor, data)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def _sync(directory: pathlib.Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
