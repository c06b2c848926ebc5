"""A new run that begins with a step of another one."""

import errno
import os
import pathlib
import shutil
import uuid
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, inspect
from eqx_ckpt.__main__ import main
from faults import forks_of_runs, runs
from faults.forks_of_runs import state
from faults.manifests import edited
from faults.shim import Fault
from faults.zygote import OF_MANY, Zygote
from helpers import assert_same
from stores.place import Place
from support import fork_step


TREE = state(0)
WAYS: list[dict[str, Any]] = [
    {},
    {"incremental": True},
    {"compression": "zstd"},
    {"layout": "ocdbt"},
]


def trained(run: Any, **how: Any) -> CheckpointManager:
    """A run with two steps, of which the second one is the newest."""
    manager = CheckpointManager(run, **how)
    for step in (1, 2):
        tree = state(step)
        manager.save(step, tree, metadata={"loss": step}).result()
    return manager


def history(path: Any) -> inspect.History:
    found = inspect.read_manifest(path).history
    assert found is not None
    return found


def inodes(path: pathlib.Path) -> dict[str, int]:
    return {
        str(file.relative_to(path)): file.stat().st_ino
        for file in path.rglob("*")
        if file.is_file()
    }


def files(root: pathlib.Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in root.rglob("*")}


def check_fork(manager: CheckpointManager, new: str, **how: Any) -> None:
    """Fork step 2; both runs go on, and the new one stands alone."""
    manager.fork(new, 2)
    there = CheckpointManager(new, **how)
    assert there.steps() == [2]
    assert_same(there.restore(TREE), state(2))
    first, before = there.read_manifest(2), manager.read_manifest(2)
    assert inspect.digest(there.path(2)) == inspect.digest(manager.path(2))
    assert first.metadata == {"loss": 2}
    assert first.leaves == before.leaves
    assert first.history is not None
    assert before.history is not None
    assert first.history.run != before.history.run
    assert first.history.sessions[:-1] == before.history.sessions
    assert first.history.forked is not None
    assert first.history.forked[:2] == (before.history.run, 2)
    assert first.history.sessions[-1].digest == first.history.forked.digest
    there.save(3, state(3)).result()
    later = there.read_manifest(3).history
    assert later is not None
    assert (later.run, later.forked) == (first.history.run, first.history.forked)
    manager.save(3, state(4)).result()
    assert manager.read_manifest(3).history.run == before.history.run  # pyright: ignore
    for step in manager.steps():
        manager.delete(step)
    for step in (2, 3):
        assert_same(there.restore(TREE, step), state(step))
        assert inspect.verify(there.path(step))


@pytest.mark.parametrize(
    ("places", "how"),
    [
        *(("here", how) for how in WAYS),
        ("to", WAYS[1]),
        ("from", WAYS[0]),
        ("from", WAYS[1]),
        ("memory", WAYS[1]),
        ("memory", WAYS[3]),
    ],
    ids=str,
)
def test_fork(tmp_path: pathlib.Path, how: dict[str, Any], places: str) -> None:
    memory = f"memory://{uuid.uuid4().hex}"
    run = tmp_path / "a" if places in ("here", "to") else f"{memory}/a"
    new = str(tmp_path / "b") if places in ("here", "from") else f"{memory}/b"
    check_fork(trained(run, **how), new, **how)


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS[1:], ids=str)
def test_fork_in_a_bucket(s3: Place, how: dict[str, Any]) -> None:
    check_fork(trained(f"{s3.url}/a", **how), f"{s3.url}/b", **how)


def test_files_are_links_and_nothing_is_read(tmp_path: pathlib.Path) -> None:
    manager = trained(tmp_path / "a")
    chunk = tmp_path / "a/000002/w/c.0"
    chunk.write_bytes(bytes(chunk.stat().st_size))  # Damaged, as a read would find.
    manager.fork(tmp_path / "b")
    old, new = inodes(tmp_path / "a/000002"), inodes(tmp_path / "b/000002")
    assert old.pop("zarr.json") != new.pop("zarr.json")
    assert old == new
    assert inspect.own_bytes(tmp_path / "a")[2] < 10_000
    with pytest.raises(eqx_ckpt.CorruptCheckpointError):
        CheckpointManager(tmp_path / "b").restore(TREE)


def test_what_is_missing_is_seen(tmp_path: pathlib.Path) -> None:
    manager = trained(tmp_path / "a")
    for damage in (os.unlink, lambda path: os.truncate(path, 3)):
        chunk = tmp_path / "a/000002/w/c.0"
        data = chunk.read_bytes()
        damage(chunk)
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="w/c.0.* `step`"):
            manager.fork(tmp_path / "b", 2)
        assert not (tmp_path / "b").exists()
        chunk.write_bytes(data)
    manager.fork(tmp_path / "b", 2)


def test_a_leaf_whose_name_no_file_can_have(tmp_path: pathlib.Path) -> None:
    manager = trained(tmp_path / "a")
    name = "x" * 300

    def rename(content: dict[str, Any]) -> None:
        record = content["leaves"].pop("w")
        content["leaves"][name] = record | {"path": [["k", name]]}

    manifest = tmp_path / "a/000002/zarr.json"
    manifest.write_bytes(edited(manifest.read_bytes(), rename))
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="xx/c.0 is missing"):
        manager.fork(tmp_path / "b", 2)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="xx/c.0 is missing"):
        inspect.verify(manifest.parent)


@pytest.mark.parametrize("how", [{}, {"layout": "ocdbt"}], ids=str)
def test_a_copy_is_verified(tmp_path: pathlib.Path, how: dict[str, Any]) -> None:
    manager = trained(tmp_path / "a", **how)
    for path in (tmp_path / "a/000002").rglob("*"):
        if path.is_file() and path.stat().st_size > 700:
            data = path.read_bytes()
            damaged = data[:-600] + bytes(byte ^ 1 for byte in data[-600:-500])
            if path.name != "zarr.json":
                path.write_bytes(damaged + data[-500:])
    new = f"memory://{uuid.uuid4().hex}/b"
    with pytest.raises(eqx_ckpt.CorruptCheckpointError):
        manager.fork(new)
    assert CheckpointManager(new).steps() == []


def test_without_links(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = trained(tmp_path / "a")

    def refused(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refused)
    check_fork(manager, str(tmp_path / "b"))


def test_from_the_mirror(tmp_path: pathlib.Path) -> None:
    there = f"memory://{uuid.uuid4().hex}/there"
    mirror = eqx_ckpt.Mirror(there)
    with trained(tmp_path / "a", mirror=mirror) as manager:
        manager.uploads()[2].result()  # Step 1 is not uploaded if step 2 comes first.
        shutil.rmtree(tmp_path / "a/000002")
        manager.fork(tmp_path / "b")
        assert_same(CheckpointManager(tmp_path / "b").restore(TREE, 2), state(2))
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match="of this run itself"):
            manager.fork(there, 1)


def test_a_fork_of_a_fork_and_of_a_renamed_step(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = trained(tmp_path / "a")
    one.fork(tmp_path / "b", 1)
    two = CheckpointManager(tmp_path / "b")
    two.restore(TREE)
    two.save(5, state(5)).result()
    (tmp_path / "b/000005").rename(tmp_path / "b/000007")
    two.fork(tmp_path / "c")
    first, last = history(tmp_path / "b/000001"), history(tmp_path / "c/000007")
    assert last.step == 7
    assert last.forked is not None
    assert first.forked is not None
    assert last.forked[:2] == (first.run, 5)
    assert len(last.sessions) == 4
    assert main(["ls", str(tmp_path / "c")]) == 0
    mark = f"[latest, forked from step 5 of run {first.run[:8]}]"
    assert mark in capsys.readouterr().out
    assert main(["ls", str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert out.count("forked from") == 1


def test_another_start_in_a_fork(tmp_path: pathlib.Path) -> None:
    trained(tmp_path / "a").fork(tmp_path / "b")
    CheckpointManager(tmp_path / "b").save(3, TREE).result()
    first, other = history(tmp_path / "b/000002"), history(tmp_path / "b/000003")
    assert (other.run, other.forked) == (first.run, first.forked)
    assert len(other.sessions) == 1


def test_a_fork_of_a_step_without_a_history(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eqx_ckpt.tree_serialise_leaves(tmp_path / "a/000004", TREE)
    CheckpointManager(tmp_path / "a").fork(tmp_path / "b")
    found = history(tmp_path / "b/000004").forked
    assert found is not None
    assert found[:2] == (None, 4)
    assert main(["ls", str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "forked from step 4 of a run without a history" in out


def test_the_command(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("typer")
    trained(tmp_path / "a")
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["fork", a, b, "--step", "1"]) == 0
    assert capsys.readouterr().out == f"forked to {b}/000001\n"
    assert main(["fork", a, c]) == 0
    assert CheckpointManager(c).steps() == [2]
    assert main(["fork", a, b]) == 2
    assert "There is a run at" in capsys.readouterr().err


@pytest.mark.parametrize(
    "what", ["run", "itself", "checkpoint", "inside", "file", "misnamed"]
)
def test_where_no_run_can_begin(tmp_path: pathlib.Path, what: str) -> None:
    manager = trained(tmp_path / "a")
    eqx_ckpt.tree_serialise_leaves(tmp_path / "checkpoint", TREE)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "misnamed/7", TREE)
    trained(tmp_path / "run").delete(1)
    (tmp_path / "file").write_text("mine")
    places = {"itself": "a", "inside": "checkpoint/inside"}
    before = files(tmp_path)
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="Nothing was written"):
        manager.fork(tmp_path / places.get(what, what), 1)
    assert files(tmp_path) == before


def test_what_cannot_be_forked(tmp_path: pathlib.Path) -> None:
    manager = trained(tmp_path / "a")
    before = files(tmp_path)
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="steps there are 1, 2"):
        manager.fork(tmp_path / "b", 3)
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        CheckpointManager(tmp_path / "none").fork(tmp_path / "b")
    with pytest.raises(ValueError, match="is not a step"):
        manager.fork(tmp_path / "b", -1)
    assert files(tmp_path) == before


def test_parts_of_steps(tmp_path: pathlib.Path) -> None:
    with CheckpointManager(tmp_path / "a", shared=False) as manager:
        manager.save(1, TREE).result()
        with pytest.raises(eqx_ckpt.CheckpointError, match="sees a step whole"):
            manager.fork(tmp_path / "b")
    with pytest.raises(eqx_ckpt.CheckpointError, match="part 0 of 1.*mirror"):
        CheckpointManager(tmp_path / "a").fork(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_running_save_is_waited_for(tmp_path: pathlib.Path) -> None:
    with CheckpointManager(tmp_path / "a") as manager:
        manager.save(1, {"w": jnp.ones(1000)})
        manager.fork(tmp_path / "b", np.int64(1))
    assert CheckpointManager(tmp_path / "b").steps() == [1]


@pytest.mark.parametrize("where", ["directory", "memory"])
def test_two_forks_at_once(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The other one commits after this one has looked: the later one is taken back."""
    a, b = trained(tmp_path / "a"), trained(tmp_path / "b")
    is_memory = where == "memory"
    run = f"memory://{uuid.uuid4().hex}/c" if is_memory else str(tmp_path / "c")
    begin = fork_step.Save.begin

    def late(self: Any, *args: Any, **how: Any) -> None:
        monkeypatch.undo()
        b.fork(run, 1)
        begin(self, *args, **how)

    monkeypatch.setattr(fork_step.Save, "begin", late)
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="taken back"):
        a.fork(run, 2)
    there = CheckpointManager(run)
    assert there.steps() == [1]
    assert_same(there.restore(TREE), state(1))
    forked = there.read_manifest(1).history
    assert forked is not None
    assert forked.forked is not None
    assert forked.forked.run == history(tmp_path / "b/000001").run


@pytest.mark.parametrize("where", ["directory", "memory"])
def test_another_fork_that_is_taken_back_meanwhile(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is listed, and is gone when its history is read."""
    is_memory = where == "memory"
    run = f"memory://{uuid.uuid4().hex}/c" if is_memory else str(tmp_path / "c")
    read = fork_step.read_history

    def late(place: Any) -> Any:
        if "000001" in str(place):
            CheckpointManager(run).delete(1)
        return read(place)

    a, b = trained(tmp_path / "a"), trained(tmp_path / "b")
    begin = fork_step.Save.begin

    def other_first(self: Any, *args: Any, **how: Any) -> None:
        monkeypatch.setattr(fork_step.Save, "begin", begin)
        b.fork(run, 1)
        monkeypatch.setattr(fork_step, "read_history", late)
        begin(self, *args, **how)

    monkeypatch.setattr(fork_step.Save, "begin", other_first)
    a.fork(run, 2)
    assert CheckpointManager(run).steps() == [2]
    assert_same(CheckpointManager(run).restore(TREE), state(2))


# Of a fork of three arrays.
OPERATIONS = 18


@pytest.mark.once
def test_kill_at_every_operation(zygote: Zygote, disk: pathlib.Path) -> None:
    """There is the whole new run or none, and what is left is removed."""
    zygote.call(forks_of_runs.train, str(disk / "before"))
    hits: dict[str, list[str]] = {}
    for n in range(1, OPERATIONS + 1):
        place = disk / str(n)
        shutil.copytree(disk / "before", place)
        fault = Fault(str(place), n)
        outcome = zygote.run(forks_of_runs.fork, str(place), fault=fault)
        assert outcome.error is None
        hits[str(place)] = outcome.hits
    assert all([*hits.values()][: OPERATIONS // 2])
    found = zygote.call(runs.each, forks_of_runs.look, [*hits], timeout=OF_MANY)
    assert [[], []] not in found
    for (old, new), hit in zip(found, hits.values(), strict=True):
        assert old == [1, 2], hit
        assert new in ([], [2]), hit
    assert found[0] == [[1, 2], []]
