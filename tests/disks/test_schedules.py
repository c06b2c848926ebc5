"""Processes that share a disk are right under every schedule that is tried."""

import contextlib
import errno
import fcntl
import os
import shutil
import types
import uuid
from collections.abc import Generator, Iterable
from typing import Any

import pytest

import eqx_ckpt
from tests.disks import commits, schedules
from tests.scheduler import play_all
from tests.support import (
    attempt_lock,
    delete,
    directory_place,
    directory_steps,
    SharedFiles,
)


pytestmark = pytest.mark.once


PLAYS = [commits.play, schedules.play]


@pytest.mark.parametrize("play", PLAYS)
def test_what_happens_is_right(play):
    play_all(play, range(20))


@pytest.mark.slow
@pytest.mark.parametrize("play", PLAYS)
def test_what_happens_is_right_of_many(play):
    play_all(play, range(20, 400))


@pytest.mark.parametrize("play", PLAYS)
def test_a_seed_repeats_a_schedule(play):
    first, _, second = (play(seed).simulation.clock for seed in (1, 2, 1))
    assert first == second


class Like:
    """A module in which some functions are others."""

    def __init__(self, module: types.ModuleType, **changes: Any) -> None:
        self._module = module
        vars(self).update(changes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def nothing_is_flushed(monkeypatch):
    monkeypatch.setattr(directory_place, "flush", lambda *_: None)


def the_rename_replaces_what_is_there(monkeypatch):
    def rename(source: str, target: str) -> None:
        shutil.rmtree(target, ignore_errors=True)
        os.rename(source, target)

    monkeypatch.setattr(directory_place, "os", Like(os, rename=rename))


def what_is_replaced_is_removed_first(monkeypatch):
    def exchange(new: str, old: str) -> None:
        shutil.rmtree(old)
        os.rename(new, old)

    monkeypatch.setattr(directory_place, "exchange", exchange)


def the_rename_is_not_flushed(monkeypatch):
    monkeypatch.setattr(directory_place, "os", Like(os, fsync=lambda _: None))


def a_step_is_deleted_where_it_is(monkeypatch):
    def remove(paths: Iterable[str]) -> None:
        for path in paths:
            delete(path)

    monkeypatch.setattr(directory_steps, "_remove", remove)


def locks_keep_nobody_out(monkeypatch):
    monkeypatch.setattr(attempt_lock, "fcntl", Like(fcntl, flock=lambda *_: None))


def the_lock_comes_after_the_directory(monkeypatch):
    make_folder = directory_place.make_folder

    @contextlib.contextmanager
    def unlocked(target: str) -> Generator[str]:
        parent, name = os.path.split(target)
        yield f"{parent}/.{name}.{uuid.uuid4().hex}"

    def changed(path: str) -> int:
        folder = make_folder(path)
        lock = os.open(path[:-4] + ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return folder

    monkeypatch.setattr(directory_place, "locked_attempt", unlocked)
    monkeypatch.setattr(directory_place, "make_folder", changed)


def links_are_not_compared(monkeypatch):
    monkeypatch.setattr(SharedFiles, "_is_equal", lambda *_: True)


def what_was_taken_back_is_not_flushed(monkeypatch):
    def undo(self: Any, replaced: bool) -> None:
        self._move_back(replaced)
        self.is_ours = True

    monkeypatch.setattr(directory_place._DirectoryAttempt, "_undo", undo)


def an_overwrite_is_taken_back_whatever_is_there(monkeypatch):
    def exchange_back(self: Any) -> None:
        directory_place.exchange(self.temporary, self.target)

    attempt = directory_place._DirectoryAttempt
    monkeypatch.setattr(attempt, "_exchange_back", exchange_back)


@pytest.mark.parametrize(
    ("play", "defect", "first"),
    [
        (commits.play, nothing_is_flushed, 10),
        (commits.play, the_rename_replaces_what_is_there, 150),
        (commits.play, what_is_replaced_is_removed_first, 0),
        (commits.play, the_rename_is_not_flushed, 20),
        (commits.play, a_step_is_deleted_where_it_is, 0),
        (commits.play, locks_keep_nobody_out, 0),
        (commits.play, the_lock_comes_after_the_directory, 30),
        (commits.play, what_was_taken_back_is_not_flushed, 190),
        (schedules.play, links_are_not_compared, 0),
        (commits.play, an_overwrite_is_taken_back_whatever_is_there, 1_430),
    ],
)
def test_a_defect_is_found_soon(monkeypatch, play, defect, first):
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        play_all(play, range(first, first + 10))


@pytest.mark.parametrize("is_there", [False, True])
def test_what_is_taken_back_leaves_what_has_replaced_it(
    tmp_path, monkeypatch, is_there
):
    """A flush fails, and another writer comes before the name is given back."""
    place, renames = tmp_path / "ckpt", []

    def save(value: int) -> None:
        eqx_ckpt.tree_serialise_leaves(place, {"x": value}, overwrite=True)

    def renamed(rename: Any) -> Any:
        def change(*paths: str) -> None:
            renames.append(paths)
            if len(renames) == 2:
                save(3)
            rename(*paths)

        return change

    def fsync(folder: int) -> None:
        if len(renames) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(folder)

    if is_there:
        save(1)
    exchange = renamed(directory_place.exchange)
    monkeypatch.setattr(directory_place, "exchange", exchange)
    changed = Like(os, rename=renamed(os.rename), fsync=fsync)
    monkeypatch.setattr(directory_place, "os", changed)
    with pytest.raises(OSError, match="No space"):
        save(2)
    assert len(renames) > 2
    assert eqx_ckpt.load(place) == {"x": 3}
    assert os.listdir(tmp_path) == ["ckpt"]
