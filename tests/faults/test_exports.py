"""Exports and copies on a disk that fails: a clear error, and the old file is there."""

import os
import pathlib
import shutil
import signal

import pytest

import eqx_ckpt
from faults import exports, replay, workloads
from faults.failures import assert_says_why, ERRORS
from faults.shim import Fault
from faults.zygote import OF_MANY, Zygote


pytestmark = pytest.mark.once


@pytest.mark.parametrize("old", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(
    ("name", "distance"),
    [
        *((name, 1) for name in exports.WRITERS if name != "orbax"),
        pytest.param("orbax", 17, marks=pytest.mark.slow),
        pytest.param("orbax", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_each_operation_fails(
    zygote: Zygote, disk: pathlib.Path, name: str, distance: int, error: str, old: bool
) -> None:
    """Orbax needs many, and is imported for each test."""
    if name == "orbax":
        pytest.importorskip("orbax.checkpoint")
    fault = Fault("", 0, error, ERRORS[error])
    call = (exports.strike, str(disk), name, old, fault, distance)
    before, after, strikes = zygote.call(*call, timeout=OF_MANY)
    for hits, raised, found, left in strikes:
        where = f"{error} at {hits}: {raised!r}"
        is_cleaning = hits[0].startswith(("unlink", "open"))
        assert not left or is_cleaning, (where, left)
        if raised is None:
            assert found == after, where
            continue
        if "Orbax reported no error" in str(raised):
            assert name == "orbax", where
            assert found == before, where
            continue
        assert_says_why(raised, error)
        assert found in (before, after), where
        if error == "ENOSPC" and hits[0].startswith("write"):
            assert "delete what is no longer needed" in str(raised), where
            assert str(disk) in str(raised) or "leaf '" in str(raised), where
        # What cannot be flushed may be there all the same; what cannot be written, not.
        if not hits[0].startswith(("sync", "unlink", "open")):
            assert found == before, where
    assert len(strikes) > 2


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "orbax" else [])
        for name in exports.WRITERS
    ],
)
def test_every_crash_state(zygote: Zygote, disk: pathlib.Path, name: str) -> None:
    """The old one is there, or the new one, which stays once the call has returned."""
    if name == "orbax":
        pytest.importorskip("orbax.checkpoint")
    old, new = zygote.call(exports.digests, str(disk), name)
    root, log = shutil.copytree(disk / "first", disk / "root"), disk / "log"
    fault = Fault(str(root), log=str(log))
    assert zygote.run(exports.replace, str(root), name, fault=fault).error is None

    def check(directory: pathlib.Path, notes: list[str]) -> None:
        there = exports.digest(f"{directory}/{name}")
        assert there in ([new] if "saved" in notes else [old, new]), notes

    result = replay.explore(log, root, disk / "first", disk, check)
    assert result.states > 3
    assert not result.bad, str(result)


@pytest.mark.parametrize("name", [name for name in exports.WRITERS if name != "orbax"])
def test_what_a_killed_one_leaves_in_a_run_is_removed(
    zygote: Zygote, disk: pathlib.Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """By the next manager, without a warning, as of a killed save."""
    with eqx_ckpt.CheckpointManager(disk / "run") as manager:
        manager.save(1, workloads.tree(1))
    source = str(disk / "run" / "000001")
    outcome = zygote.run(exports.write_and_die, name, source, str(disk / "run" / name))
    assert outcome.signal == signal.SIGKILL
    assert len({*os.listdir(disk / "run")} - {"000001"}) == 2  # And its lock.
    with eqx_ckpt.CheckpointManager(disk / "run") as manager:
        assert manager.steps() == [1]
    assert os.listdir(disk / "run") == ["000001"]
    assert not [r for r in caplog.records if r.levelname != "INFO"]
