"""Leaves whose names differ only by letter case, where the disk ignores that."""

import pathlib
from typing import Any

import numpy as np
import pytest

import eqx_ckpt
from faults import folding
from faults.zygote import Zygote
from helpers import assert_same


A, B = np.arange(3.0), np.arange(4.0)
# Trees with a pair of arrays each, and their names.
PAIRS = [
    ({"attn": {"Wq": A, "wq": B}, "x": A}, ("attn/Wq", "attn/wq")),
    ({"Attn": {"x": A}, "attn": [B]}, ("Attn/x", "attn/0")),
    ({"W": A, "w": {"zarr": B}}, ("W", "w/zarr")),
]


@pytest.mark.parametrize(("tree", "pair"), PAIRS)
def test_they_are_refused_by_all_that_save(
    zygote: Zygote, disk: pathlib.Path, tree: Any, pair: tuple[str, str]
) -> None:
    root, other = disk / "folding", disk / "other"
    old = {"old": A}
    eqx_ckpt.tree_serialise_leaves(root / "old", old)
    eqx_ckpt.tree_serialise_leaves(other, tree)
    flat = {name: array for name, _, array in eqx_ckpt.inspect.iter_leaves(other)}
    np.savez(f"{other}.npz", **flat)
    found = zygote.call(folding.errors, str(root), tree, tree, str(other))
    assert len(found) == 8
    for way, (kind, text) in found.items():
        assert kind == "LeafNameError", way
        assert f"{pair[0]!r} and {pair[1]!r}" in text, way
        assert "ignores letter case" in text
        assert "Rename one of each" in text
        assert ("layout='ocdbt'" in text) == (way != "recording")
    # Nothing is lost, and nothing is left.
    assert_same(eqx_ckpt.tree_deserialise_leaves(root / "old", old), old)
    entries = {path.name for path in root.iterdir()}
    assert entries == {"old", "run", "recording", "states"}
    assert not [*(root / "run").iterdir()]


def test_they_are_refused_by_all_processes_of_a_job(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    tree = PAIRS[0][0]
    (disk / "folding").mkdir()
    eqx_ckpt.tree_serialise_leaves(disk / "other", tree)
    args = (str(disk / "folding"), tree, str(disk / "other"))
    for errors in zygote.call(folding.in_a_job, *args):
        for kind, text in errors:
            assert kind == "LeafNameError"
            assert "'attn/Wq' and 'attn/wq'" in text
    assert not [*(disk / "folding").iterdir()]


@pytest.mark.parametrize(
    ("tree", "layout"),
    [
        *((tree, "ocdbt") for tree, _ in PAIRS),
        ({"Wq": A, "wQ": 1, "wq": 2.5, "bias": B}, "zarr"),
        ({"Wq": A, "wk": B}, "zarr"),
    ],
)
def test_a_database_holds_them_and_so_do_numbers(
    zygote: Zygote, disk: pathlib.Path, tree: Any, layout: str
) -> None:
    args = (str(disk), tree, layout)
    restored, entries = zygote.call(folding.there_and_back, *args)
    assert_same(restored, tree)
    assert entries == ["new"]


def test_a_checkpoint_that_was_copied_there_is_never_wrong(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    """One of two leaves has the files of the other."""
    tree = {"Wq": np.zeros(3), "wq": np.ones(3), "empty": np.ones(0), "Empty": A[:0]}
    eqx_ckpt.tree_serialise_leaves(disk / "new", tree)
    (disk / "folding").mkdir()
    args = (str(disk / "new"), str(disk / "folding"), tree)
    found = zygote.call(folding.moved, *args)
    kinds = [kind for kind, _ in found]
    damaged = "CorruptCheckpointError"
    assert sorted(kinds[:2]) == ["", damaged]
    assert kinds[2:] == ["", "", damaged, damaged]


def test_where_case_counts_each_has_its_directory(tmp_path: pathlib.Path) -> None:
    for tree, pair in PAIRS:
        eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree, overwrite=True)
        assert {*pair} <= {*eqx_ckpt.inspect.read_manifest(tmp_path / "new").leaves}
        assert all((tmp_path / "new" / name / "c.0").is_file() for name in pair)
        assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", tree), tree)
