"""A checkpoint that somebody changes while it is read: before each file is opened.

What is read is of one version, or it is an error that says so.
"""

import functools as ft
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eqx_ckpt


OLD, NEW = 1.0, 2.0
LIKE = {"a": np.zeros(3), "in": {"b": np.zeros(3)}}


def save(path: Path, value: float) -> None:
    tree = {"a": np.full(3, value), "in": {"b": np.full(3, value)}}
    eqx_ckpt.tree_serialise_leaves(path, tree, overwrite=True)


def restored(path: Path) -> set[float]:
    tree = eqx_ckpt.tree_deserialise_leaves(path, LIKE)
    return {*tree["a"], *tree["in"]["b"]}


def listed(path: Path) -> set[float]:
    return {x for *_, value in eqx_ckpt.inspect.iter_leaves(path) for x in value}


def measured(path: Path) -> set[float]:
    found = eqx_ckpt.inspect.stats(path).values()
    return {x for leaf in found for x in (leaf.min, leaf.max)}


def verified(path: Path) -> set[float]:
    eqx_ckpt.inspect.verify(path)
    return {OLD}


def copied(path: Path) -> set[float]:
    eqx_ckpt.copy(path, path.with_name("copy"), overwrite=True)
    return restored(path.with_name("copy"))


def compared(path: Path) -> set[float]:
    """Both leaves differ from the other checkpoint, or none does."""
    differing = eqx_ckpt.inspect.diff(path, path.with_name("other"), values=True)
    return {len(differing) / len(LIKE)}


def swap_chunks(path: Path, *, most: int = 9) -> None:
    for chunk in sorted(path.rglob("c.*"))[:most]:
        shutil.copy(path.with_name("new") / chunk.relative_to(path), chunk)


def swap_a_chunk(path: Path) -> None:
    swap_chunks(path, most=1)


def swap_the_manifest(path: Path) -> None:
    shutil.copy(path.with_name("new") / "zarr.json", path)


def link_to_another(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("new"))


def link_a_folder(path: Path) -> None:
    (path / "a").rename(path / "moved")
    (path / "a").symlink_to(path.with_name("new") / "a")


def become_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"a file")


def become_a_pipe(path: Path) -> None:
    chunk = min(path.rglob("c.*"))
    chunk.unlink()
    os.mkfifo(chunk)


CHANGES: list[Callable[[Path], object]] = [
    lambda path: save(path, NEW),
    shutil.rmtree,
    lambda path: (path / "zarr.json").unlink(),
    swap_chunks,
    swap_a_chunk,
    swap_the_manifest,
    link_to_another,
    link_a_folder,
    become_a_file,
    become_a_pipe,
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "read", [restored, listed, measured, verified, copied, compared]
)
def test_what_is_read_is_of_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], set[float]]
) -> None:
    system_open = os.open
    opened, lock = 0, threading.Lock()
    change: Callable[[], object] | None = None

    def counting(path: Any, *args: Any, **kwargs: Any) -> int:
        nonlocal opened, change
        now = None
        with lock:
            opened -= 1
            if opened < 0:
                now, change = change, None
        if now is not None:
            now()
        return system_open(path, *args, **kwargs)

    def attempt(place: Path, at: int) -> set[float]:
        nonlocal opened
        save(place, OLD)
        opened = at
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", counting)
            return read(place)

    for folder in ("other", "new"):
        save(tmp_path / folder, OLD if folder == "other" else NEW)
    # A comparison with the old one finds no difference, or all.
    versions = ({0.0}, {1.0}) if read is compared else ({OLD}, {NEW})
    assert attempt(tmp_path / "c", 0) == versions[0]
    count = -opened
    assert count > 1
    for number, how in enumerate(CHANGES):
        for at in range(count):
            place = tmp_path / f"{number}-{at}" / "c"
            place.parent.mkdir()
            for folder in ("other", "new"):
                shutil.copytree(tmp_path / folder, place.with_name(folder))
            change = ft.partial(how, place)
            problem = str(place)
            try:
                assert attempt(place, at) in versions, (number, at)
            except eqx_ckpt.CheckpointError as e:
                problem = str(e)
            assert str(place.parent) in problem, (number, at)
            shutil.rmtree(place.parent)
