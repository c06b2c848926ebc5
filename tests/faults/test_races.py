"""Several processes at one path: one wins, and nobody sees a mixture."""

import itertools
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

import eqx_ckpt
from faults import races, workloads
from faults.shim import CHANGES, Fault
from faults.zygote import Zygote


pytestmark = pytest.mark.once


LAYOUTS = ["zarr", "ocdbt"]
SEEDS = [1, 2, 3]
ROUNDS = 15


def _saves(
    path: str, overwrite: bool, layout: eqx_ckpt.typing.Layout
) -> dict[int, races.Call]:
    return {seed: (workloads.save, (path, seed, overwrite, layout)) for seed in SEEDS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_of_several_writers_wins(
    zygote: Zygote, disk: pathlib.Path, layout: eqx_ckpt.typing.Layout
) -> None:
    for n in range(ROUNDS):
        path = str(disk / str(n))
        answers = zygote.call(races.at_once, _saves(path, False, layout))
        assert sorted(answers.values()) == ["exists", "exists", "saved"]
        assert answers[zygote.call(workloads.load, path)] == "saved"
    assert len(list(disk.iterdir())) == ROUNDS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_writers_replace_one_checkpoint(
    zygote: Zygote, disk: pathlib.Path, layout: eqx_ckpt.typing.Layout
) -> None:
    path = str(disk / "new")
    zygote.call(workloads.save, path, 1)
    for _ in range(ROUNDS):
        answers = zygote.call(races.at_once, _saves(path, True, layout))
        assert set(answers.values()) <= {"exists", "saved"}
        assert answers[zygote.call(workloads.load, path)] == "saved"
        assert os.listdir(disk) == ["new"]


def _overtaken(
    zygote: Zygote,
    disk: pathlib.Path,
    first: races.Call,
    second: races.Call,
    old: int | None,
    what: str = "STOP",
    kinds: tuple[str, ...] = CHANGES,
    layout: eqx_ckpt.typing.Layout = "zarr",
) -> Iterator[tuple[Any, Any, int | None, list[str]]]:
    """Let the second call overtake the first, before each operation of the first.

    Gives what both returned or raised, what is at "new" then, and all names. Before,
    the tree `old` was there.
    """
    (disk / "template").mkdir()
    if old is not None:
        path = str(disk / "template" / "new")
        zygote.call(workloads.save, path, old, False, layout)
    for n in itertools.count(1):
        directory = disk / "copy"
        shutil.copytree(disk / "template", directory)
        calls = [(f, (str(directory / "new"), *args)) for f, args in (first, second)]
        fault = Fault(str(directory), n, what, kinds)
        look = (workloads.load, (str(directory / "new"),))
        answers = zygote.call(races.overtake_and_look, fault, *calls, look)
        if answers is None:
            assert n > 3
            break
        yield *answers, os.listdir(directory)
        shutil.rmtree(directory)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_writer_is_overtaken(
    zygote: Zygote, disk: pathlib.Path, layout: eqx_ckpt.typing.Layout
) -> None:
    first, second = ((workloads.save, (n, False, layout)) for n in (1, 2))
    winners = set()
    for one, two, there, names in _overtaken(zygote, disk, first, second, None):
        loser = two if there == 1 else one
        assert isinstance(loser, eqx_ckpt.CheckpointExistsError)
        assert [one, two].count(None) == 1  # what a save returns
        assert names == ["new"]
        winners.add(there)
    assert winners == {1, 2}


def test_a_writer_that_overwrites_is_overtaken(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    first, second = (workloads.save, (1, True)), (workloads.save, (2, True))
    winners = set()
    for one, two, there, names in _overtaken(zygote, disk, first, second, 0):
        assert two is None
        assert one is None
        assert names == ["new"]
        winners.add(there)
    assert winners == {1, 2}


@pytest.mark.parametrize("old", [None, 0])
def test_a_writer_that_fails_does_not_take_the_overtaker_away(
    zygote: Zygote, disk: pathlib.Path, old: int | None
) -> None:
    first, second = (workloads.save, (1, True)), (workloads.save, (2, True))
    failed = ("STOP_EIO", ("sync", "rename"))
    for one, two, there, names in _overtaken(zygote, disk, first, second, old, *failed):
        assert isinstance(one, OSError), repr(one)
        assert two is None
        assert there == 2
        assert names == ["new"]


@pytest.mark.parametrize(
    ("before", "after"), [("zarr", "zarr"), ("ocdbt", "ocdbt"), ("ocdbt", "zarr")]
)
def test_a_reader_is_overtaken(
    zygote: Zygote,
    disk: pathlib.Path,
    before: eqx_ckpt.typing.Layout,
    after: eqx_ckpt.typing.Layout,
) -> None:
    """A writer replaces the checkpoint before each file that a reader opens."""
    first, second = (workloads.load, ()), (workloads.save, (2, True, after))
    reading = ("STOP", ("open", "read"), before)
    for one, two, there, _ in _overtaken(zygote, disk, first, second, 1, *reading):
        assert two is None
        assert there == 2
        assert one in (1, 2), repr(one)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_vanish_while_they_are_read(
    zygote: Zygote, disk: pathlib.Path, layout: eqx_ckpt.typing.Layout
) -> None:
    first, second = (workloads.load, ()), (workloads.lose_chunks, ())
    (disk / "template").mkdir()
    zygote.call(workloads.save, str(disk / "template" / "new"), 1, False, layout)
    for n in itertools.count(1):
        path = str(shutil.copytree(disk / "template", disk / str(n)) / "new")
        fault = Fault(path, n, "STOP", ("open", "read"))
        calls = [(function, (path, *args)) for function, args in (first, second)]
        answers = zygote.call(races.overtake, fault, *calls)
        if answers is None:
            break
        assert answers[0] == 1 or isinstance(
            answers[0], eqx_ckpt.CorruptCheckpointError
        )
