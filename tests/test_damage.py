"""What is damaged at rest is reported by name, and never restored as other values."""

import os
import pathlib
import random
import shutil
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import eqx_ckpt
from faults import workloads
from faults.workloads import every_kind


pytest_plugins = ["faults.fixtures"]

FLIPS = 20  # places in each file
REFUSALS = (eqx_ckpt.CorruptCheckpointError, eqx_ckpt.CheckpointNotFoundError)


def _bits(tree: Any) -> list[bytes]:
    """The leaves' bits: a NaN is like itself, and -0.0 is not 0.0."""
    leaves = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and leaf.dtype == jax.random.key(0).dtype:
            leaf = jax.random.key_data(leaf)
        leaves.append(np.asarray(leaf).tobytes())
    return leaves


@pytest.fixture
def path(disk: pathlib.Path) -> pathlib.Path:
    with workloads.small_chunks(32):
        eqx_ckpt.tree_serialise_leaves(disk / "new", every_kind(1))
        eqx_ckpt.tree_serialise_leaves(disk / "other", every_kind(2))
    return disk / "new"


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def _leaf(path: pathlib.Path, file: pathlib.Path) -> str:
    """The name of the leaf that a file belongs to; '' for the manifest."""
    relative = file.relative_to(path).as_posix()
    names = eqx_ckpt.read_manifest(path.with_name("other")).leaves
    return next((name for name in names if relative.startswith(name + "/")), "")


def _report(path: pathlib.Path) -> str:
    """What `verify` says; a restore is refused too, or it is exact: never silent."""
    try:
        restored = eqx_ckpt.tree_deserialise_leaves(path, every_kind(0))
        refusal = ""
        assert _bits(restored) == _bits(every_kind(1)), "other values, without a word"
    except REFUSALS as e:
        refusal = str(e)
    try:
        eqx_ckpt.verify(path)
    except REFUSALS as e:
        return str(e)
    assert not refusal, f"`verify` finds nothing, but a restore says {refusal}"
    return ""


def _check(path: pathlib.Path, file: pathlib.Path, damage: str) -> None:
    report = _report(path)
    assert report, f"{damage} of {file} is not found"
    assert _leaf(path, file) in report, f"{damage} of {file}: {report}"


def _damaged(data: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """Every kind of damage of a file's bytes that leaves a file there."""
    yield "truncation to nothing", b""
    yield "truncation by half", data[: len(data) // 2]
    yield "truncation by a byte", data[:-1]
    yield "appending", data + b"\0"
    yield "doubling", data + data
    yield "zeroing", bytes(len(data))
    places = random.Random(name)
    for _ in range(FLIPS):
        flipped = bytearray(data)
        bit = places.randrange(len(data) * 8)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"flipping bit {bit}", bytes(flipped)


def test_nothing_is_damaged(path: pathlib.Path) -> None:
    assert _report(path) == ""
    assert len(list((path / "chunks").glob("c.*"))) == 4


@pytest.mark.parametrize("pattern", ["c*", "zarr.json"])
def test_every_damage_of_every_file(path: pathlib.Path, pattern: str) -> None:
    files = [file for file in _files(path) if file.match(pattern)]
    assert len(files) > 10
    for file in files:
        original = file.read_bytes()
        for damage, data in _damaged(original, file.name):
            file.write_bytes(data)
            _check(path, file, damage)
        file.write_bytes(original)
    assert _report(path) == ""


def test_every_missing_file(path: pathlib.Path) -> None:
    for file in _files(path):
        file.rename(path / "aside")
        _check(path, file, "removal")
        (path / "aside").rename(file)
    assert _report(path) == ""


def test_every_missing_directory(path: pathlib.Path) -> None:
    for folder in sorted(p for p in path.rglob("*") if p.is_dir()):
        folder.rename(path.with_name("aside"))
        _check(path, folder / "c.0", "removal")
        path.with_name("aside").rename(folder)
    assert _report(path) == ""


def test_swapped_files(path: pathlib.Path) -> None:
    """Each file is whole, in another's place: a checksum in the file sees nothing."""
    files = [file for file in _files(path) if file.name != "zarr.json"]
    swaps = 0
    for i, one in enumerate(files):
        for two in files[:i]:
            same_size = one.stat().st_size == two.stat().st_size
            if not same_size or one.read_bytes() == two.read_bytes():
                continue
            _swap(one, two)
            report = _report(path)
            assert _leaf(path, one) in report, f"swap of {one} and {two}: {report!r}"
            assert _leaf(path, two) in report, f"swap of {one} and {two}: {report!r}"
            assert report, f"swap of {one} and {two} is not found"
            _swap(one, two)
            swaps += 1
    assert swaps > 6
    assert _report(path) == ""


def _swap(one: pathlib.Path, two: pathlib.Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def test_swapped_leaves(path: pathlib.Path) -> None:
    _swap(path / "f32", path / "layer" / "twin")
    report = _report(path)
    assert "f32" in report
    assert "layer/twin" in report


def test_files_of_another_checkpoint(path: pathlib.Path) -> None:
    replaced = 0
    for file in _files(path):
        original = file.read_bytes()
        other = path.with_name("other") / file.relative_to(path)
        if other.read_bytes() == original:
            continue
        shutil.copyfile(other, file)
        _check(path, file, "replacement")
        file.write_bytes(original)
        replaced += 1
    assert replaced > 8
    assert _report(path) == ""


def test_verify_finds_every_damaged_leaf_in_one_run(path: pathlib.Path) -> None:
    names = [
        name
        for name, record in eqx_ckpt.read_manifest(path).leaves.items()
        if record.is_array
    ]
    assert len(names) > 8
    names.remove("layer/zero")
    for i, name in enumerate(names):
        victim = _files(path / name)[i % 2]  # a chunk, or the metadata
        match i % 3:
            case 0:
                victim.unlink()
            case 1:
                os.truncate(victim, 1)
            case 2:
                data = victim.read_bytes()
                victim.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(eqx_ckpt.CorruptCheckpointError) as found:
        eqx_ckpt.verify(path)
    assert not [name for name in names if name not in str(found.value)]
    assert "layer/zero" not in str(found.value)


def test_only_the_damaged_leaf_is_lost(path: pathlib.Path) -> None:
    for file in (path / "chunks").glob("c.*"):
        file.unlink()
    whole = {k: v for k, v in every_kind(0).items() if k != "chunks"}
    like = {**whole, "chunks": np.ones((8, 4), np.float32)}
    restored = eqx_ckpt.tree_deserialise_leaves(
        path, like, where=lambda t: [v for k, v in sorted(t.items()) if k != "chunks"]
    )
    expected = {**every_kind(1), "chunks": like["chunks"]}
    assert _bits(restored) == _bits(expected)


def test_a_damaged_manifest_is_not_an_absent_checkpoint(path: pathlib.Path) -> None:
    manifest = path / "zarr.json"
    for size in (0, 1, 10, 100, manifest.stat().st_size):
        manifest.write_bytes(bytes(size))  # the size without the data: a power cut
        with pytest.raises(eqx_ckpt.CorruptCheckpointError):
            eqx_ckpt.read_manifest(path)
    manifest.unlink()
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        eqx_ckpt.read_manifest(path)


def test_a_damaged_checkpoint_can_be_replaced(path: pathlib.Path) -> None:
    (path / "f32" / "zarr.json").unlink()
    (path / "int4" / "c.0").write_bytes(b"")
    eqx_ckpt.tree_serialise_leaves(path, every_kind(3), overwrite=True)
    restored = eqx_ckpt.tree_deserialise_leaves(path, every_kind(0))
    assert _bits(restored) == _bits(every_kind(3))
