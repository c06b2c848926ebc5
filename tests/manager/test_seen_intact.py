"""No step is removed on the word of another one that is not intact."""

import itertools
import pathlib
import shutil
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pytest

import eqx_ckpt


LAYOUTS = ["zarr", "ocdbt"]
Damage = Callable[[pathlib.Path], None]


def tree(step: int) -> dict[str, Any]:
    return {"w": np.arange(6.0) + step, "b": np.ones(3, np.int8), "step": step}


def chunk_of(step: pathlib.Path) -> pathlib.Path:
    """A file with data, in either layout."""
    return next(iter(sorted([*step.glob("w/c.*"), *step.glob("d/*")])))


def lose_a_chunk(step: pathlib.Path) -> None:
    chunk_of(step).unlink()


def cut_a_chunk(step: pathlib.Path) -> None:
    with chunk_of(step).open("r+b") as f:
        f.truncate(2)


def link_a_chunk(step: pathlib.Path) -> None:
    chunk = chunk_of(step)
    chunk.rename(step.parent / "elsewhere")
    chunk.symlink_to(step.parent / "elsewhere")


def cut_the_manifest(step: pathlib.Path) -> None:
    with (step / "zarr.json").open("r+b") as f:
        f.truncate(600)


def lose_everything_else(step: pathlib.Path) -> None:
    for path in step.iterdir():
        if path.name != "zarr.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


DAMAGE = [
    lose_a_chunk,
    cut_a_chunk,
    link_a_chunk,
    cut_the_manifest,
    lose_everything_else,
]


def last(
    run: pathlib.Path, n: int, damage: Damage, when: int
) -> Callable[[Mapping[int, Any]], Collection[int]]:
    """Keep the last ones; somebody damages a step after its commit."""
    calls = itertools.count()

    def keep(steps: Mapping[int, Any]) -> Collection[int]:
        if next(calls) == 0 and when in steps:
            damage(run / f"{when:06d}")
        return sorted(steps)[-n:]

    return keep


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_was_damaged_after_its_commit(
    tmp_path: pathlib.Path, layout: eqx_ckpt.typing.Layout, damage: Damage
) -> None:
    with eqx_ckpt.CheckpointManager(tmp_path, layout=layout) as manager:
        manager.save(1, tree(1))
    keep = last(tmp_path, 1, damage, 2)
    with eqx_ckpt.CheckpointManager(tmp_path, layout=layout, keep=keep) as manager:
        error = manager.save(2, tree(2)).exception()
        assert isinstance(error, eqx_ckpt.CorruptCheckpointError)
        assert "000002" in str(error)
        assert "No older step was removed" in str(error)
        assert manager.steps() == [1, 2]
        assert manager.restore(tree(0), 1)["step"] == 1
        # The run goes on.
        manager.save(3, tree(3)).result()
        assert manager.steps() == [3]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_an_earlier_manager(
    tmp_path: pathlib.Path,
    layout: eqx_ckpt.typing.Layout,
    damage: Damage,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with eqx_ckpt.CheckpointManager(tmp_path, layout=layout) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree(step))
    damage(tmp_path / "000003")
    keep = eqx_ckpt.keep_last(2)
    with eqx_ckpt.CheckpointManager(tmp_path, layout=layout, keep=keep) as manager:
        manager.save(4, tree(4)).result()
        # Two that are intact, and the one that is not.
        assert manager.steps() == [2, 3, 4]
        assert "Step 3 was not seen intact" in caplog.text
        assert manager.restore(tree(0), 2)["step"] == 2


def test_a_step_that_another_process_has_removed(tmp_path: pathlib.Path) -> None:
    """That is no damage: what is there counts."""
    keep = last(tmp_path, 1, shutil.rmtree, 3)
    with eqx_ckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, tree(1))
        manager.save(2, tree(2))
    with eqx_ckpt.CheckpointManager(tmp_path, keep=keep) as manager:
        manager.save(3, tree(3)).result()
        assert manager.steps() == [2]


def test_a_step_in_memory(tmp_path: pathlib.Path) -> None:
    """In a store, by its listing."""
    url = f"memory://{tmp_path.name}"
    keep = eqx_ckpt.keep_last(1)
    with eqx_ckpt.CheckpointManager(url, keep=keep) as manager:
        for step in (1, 2, 3):
            manager.save(step, tree(step))
    assert manager.steps() == [3]


@pytest.mark.parametrize("damage", [lose_a_chunk, cut_a_chunk, link_a_chunk])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_overwrite_puts_back_what_it_replaced(
    tmp_path: pathlib.Path, layout: eqx_ckpt.typing.Layout, damage: Damage
) -> None:
    """If what it has written is not there any more."""
    path = tmp_path / "run" / "step"
    eqx_ckpt.tree_serialise_leaves(path, tree(1), layout=layout)

    def lose(phase: str, *_: object) -> None:
        if phase == "commit":
            damage(*path.parent.glob(".*.tmp"))

    with pytest.raises(eqx_ckpt.CheckpointError, match="is not intact any more"):
        eqx_ckpt.tree_serialise_leaves(
            path, tree(2), layout=layout, overwrite=True, progress=lose
        )
    eqx_ckpt.inspect.verify(path)
    assert eqx_ckpt.tree_deserialise_leaves(path, tree(0))["step"] == 1
    assert {p.name for p in path.parent.iterdir()} <= {"step", "elsewhere"}


@pytest.mark.parametrize("damage", [lose_a_chunk, cut_the_manifest])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_killed_overwrite_has_replaced(
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    layout: eqx_ckpt.typing.Layout,
    damage: Damage,
) -> None:
    """A clean-up removes it once the new one is intact."""
    run, new = tmp_path / "run", tmp_path / "new"
    step, hidden = run / "000001", run / f".000001.{'0123456789abcdef' * 2}.tmp"
    for seed, path in enumerate((hidden, new), 1):
        eqx_ckpt.tree_serialise_leaves(path, tree(seed), layout=layout)
    shutil.copytree(new, step)
    damage(step)
    eqx_ckpt.CheckpointManager(run).close()
    assert f"{hidden} stays: it is a checkpoint, and {str(step)!r}" in caplog.text
    assert eqx_ckpt.inspect.garbage_collect(run, dry_run=True) == {}
    assert eqx_ckpt.tree_deserialise_leaves(hidden, tree(0))["step"] == 1
    shutil.rmtree(step)
    new.rename(step)
    assert {*eqx_ckpt.inspect.garbage_collect(run, dry_run=True)} == {str(hidden)}
    eqx_ckpt.CheckpointManager(run).close()
    assert [path.name for path in run.iterdir()] == ["000001"]
