"""Saving: paths, overwriting, metadata, and input that it refuses."""

import os
import shutil
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from helpers import assert_same, files_below


TREE = {"w": jnp.arange(3.0), "n": 5}
OTHER = {"w": jnp.arange(4.0), "m": 6}


class PathLike:
    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)


@pytest.mark.parametrize(
    "path",
    [
        "relative",
        "~/in the home/a b",
        Path("a/b/../c"),
        PathLike("like"),
        "./slash/",
        "naïve %20 [0] {x} | ? # @",
        "ends.in.zarr",
    ],
)
def test_paths(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    eqx_ckpt.tree_serialise_leaves(path, TREE)
    assert_same(eqx_ckpt.tree_deserialise_leaves(path, TREE), TREE)
    where = Path(os.path.realpath(os.path.expanduser(os.fspath(path))))
    assert where.is_relative_to(tmp_path)
    assert files_below(where) == {"zarr.json", "w/zarr.json", "w/c.0"}
    assert [p.name for p in where.parent.iterdir()] == [where.name]


def test_an_empty_directory_is_taken(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path, TREE)
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path, TREE), TREE)


def test_a_link_to_a_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    eqx_ckpt.tree_serialise_leaves(tmp_path / "link", TREE)
    assert (tmp_path / "link").is_symlink()
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "real", TREE), TREE)


@pytest.mark.parametrize("place", ["memory://place", "new"])
def test_what_exists_is_left_alone(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    eqx_ckpt.tree_serialise_leaves(place, TREE, overwrite=True)
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="overwrite=True"):
        eqx_ckpt.tree_serialise_leaves(place, OTHER)
    assert_same(eqx_ckpt.tree_deserialise_leaves(place, TREE), TREE)


@pytest.mark.parametrize("place", ["memory://place", "new"])
def test_overwrite(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for tree in (TREE, OTHER, TREE):
        eqx_ckpt.tree_serialise_leaves(place, tree, overwrite=True)
        assert_same(eqx_ckpt.tree_deserialise_leaves(place, tree), tree)
    if place == "new":
        assert [p.name for p in tmp_path.iterdir()] == ["new"]
        assert files_below(tmp_path / "new") == {"zarr.json", "w/zarr.json", "w/c.0"}


def snapshot(path):
    return {name: (path / name).read_bytes() for name in files_below(path)}


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_are_never_touched(overwrite, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    eqx_ckpt.tree_serialise_leaves(tmp_path / "noted", TREE)
    (tmp_path / "noted" / "w" / "notes.txt").write_text("kept with the checkpoint")
    before = snapshot(tmp_path)
    for place in ("data", "file", "noted"):
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match=place):
            eqx_ckpt.tree_serialise_leaves(tmp_path / place, TREE, overwrite=overwrite)
    assert snapshot(tmp_path) == before


def test_a_parent_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("a file")
    for place in (tmp_path / "file" / "new", tmp_path / "file" / "deep" / "new"):
        with pytest.raises(NotADirectoryError):
            eqx_ckpt.tree_serialise_leaves(place, TREE)


@pytest.mark.parametrize(
    "path", ["", "a\\b", "line\nbreak", "s3x://bucket/key", "a\0b"]
)
def test_paths_that_cannot_be_trusted(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(eqx_ckpt.CheckpointError):
        eqx_ckpt.tree_serialise_leaves(path, TREE)
    with pytest.raises(eqx_ckpt.CheckpointError):
        eqx_ckpt.tree_deserialise_leaves(path, TREE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["missing", "folder", "file", "foreign", "missing/deep"]
)
def test_no_checkpoint_there(name, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("a file")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "zarr.json").write_text('{"zarr_format": 3}')
    for reader in (
        eqx_ckpt.inspect.read_manifest,
        eqx_ckpt.tree_like,
        eqx_ckpt.inspect.verify,
    ):
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match=name):
            reader(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=name):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / name, TREE)


@pytest.mark.parametrize(
    "metadata",
    [
        {"loss": 0.31, "epoch": 3, "tags": ["a", None, True], "deep": {"er": [{}]}},
        {"loss": float("nan"), "worst": [float("inf"), float("-inf")]},
        None,
        [],
        "text \ud800",
        10**30,
    ],
)
def test_metadata(metadata):
    eqx_ckpt.tree_serialise_leaves(
        "memory://metadata", TREE, metadata=metadata, overwrite=True
    )
    restored = eqx_ckpt.inspect.read_manifest("memory://metadata").metadata
    assert repr(restored) == repr(metadata)


@pytest.mark.parametrize(
    "metadata",
    [
        {"loss": jnp.ones(2)},
        {"loss": np.complex64(1)},
        {"shape": (1, 2)},
        {1: "integer key"},
        {"s": {1, 2}},
        {"@float": "nan"},
        {"big": "x" * 2**25},
    ],
)
def test_metadata_that_json_does_not_give_back(metadata, tmp_path):
    with pytest.raises(eqx_ckpt.CheckpointError, match="`metadata` cannot be saved"):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "new", TREE, metadata=metadata)
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_is_too_deep():
    metadata = []
    for _ in range(100_000):
        metadata = [metadata]
    with pytest.raises(eqx_ckpt.CheckpointError, match="`metadata` cannot be saved"):
        eqx_ckpt.tree_serialise_leaves("memory://deep", TREE, metadata=metadata)


def test_the_saved_tree_may_change_afterwards():
    """`memory://` must not keep referring to the caller's arrays."""
    array = np.arange(4.0)
    eqx_ckpt.tree_serialise_leaves("memory://alias", array, overwrite=True)
    array[:] = 7
    restored = eqx_ckpt.tree_deserialise_leaves("memory://alias", array)
    np.testing.assert_array_equal(restored, np.arange(4.0))


def test_errors_are_of_two_families():
    assert issubclass(eqx_ckpt.CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(eqx_ckpt.CheckpointExistsError, FileExistsError)
    assert issubclass(eqx_ckpt.LeafNameError, ValueError)
    assert issubclass(eqx_ckpt.LeafMismatchError, ValueError)
    ours = {e for e in vars(eqx_ckpt).values() if isinstance(e, type)}
    errors = {e for e in ours if issubclass(e, Exception)}
    assert all(issubclass(e, eqx_ckpt.CheckpointError) for e in errors)
    assert len(errors) == 6


def test_a_write_may_be_short(tmp_path, monkeypatch):
    """A file system takes as many bytes as it likes; Linux 2 GiB at most."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, part: write(fd, part[:1000]))
    tree = {"w": jnp.arange(5000.0), "part": np.ones((70, 30))[:, 3:]}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", tree), tree)


def test_several_threads_wait_for_a_slow_disk(tmp_path, monkeypatch):
    """Small arrays are written by the calling thread, until it has waited for long."""
    write, threads = os.write, set()

    def slowly(fd, part):
        threads.add(threading.get_ident())
        time.sleep(0.05)
        return write(fd, part)

    monkeypatch.setattr(os, "write", slowly)
    tree = {str(i): np.full(3, i) for i in range(30)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    assert len(threads) > 2
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", tree), tree)


def test_a_directory_that_is_removed_meanwhile_is_not_made_again(tmp_path):
    def remove(*_):
        for hidden in tmp_path.glob(".new.*.tmp"):
            shutil.rmtree(hidden)

    tree = {name: np.ones(3) for name in "abc"}
    with pytest.raises(FileNotFoundError, match="leaf 'b'"):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree, progress=remove)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_another_saves_while_this_looks(overwrite, tmp_path, monkeypatch):
    """Between a look that finds nothing, and the next one."""
    target, lstat = tmp_path / "new", os.lstat

    def late(path, **how):
        try:
            return lstat(path, **how)
        except FileNotFoundError:
            if str(path) == str(target):
                monkeypatch.undo()
                eqx_ckpt.tree_serialise_leaves(target, OTHER)
            raise

    monkeypatch.setattr(os, "lstat", late)
    if overwrite:
        eqx_ckpt.tree_serialise_leaves(target, TREE, overwrite=True)
    else:
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match="exists already"):
            eqx_ckpt.tree_serialise_leaves(target, TREE)
    there = TREE if overwrite else OTHER
    assert_same(eqx_ckpt.tree_deserialise_leaves(target, there), there)


def test_a_current_directory_that_was_removed(tmp_path, monkeypatch):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", 1)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in (
        lambda: eqx_ckpt.tree_serialise_leaves("new", 1),
        lambda: eqx_ckpt.tree_deserialise_leaves("new", 1),
        lambda: eqx_ckpt.CheckpointManager("new"),
        lambda: eqx_ckpt.interop.to_npz(tmp_path / "ckpt", "new"),
    ):
        with pytest.raises(FileNotFoundError, match="pass an absolute path: 'new'"):
            call()
    assert eqx_ckpt.tree_deserialise_leaves(tmp_path / "ckpt", 0) == 1
