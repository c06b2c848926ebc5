"""What is damaged at rest is reported by name, and never restored as other values."""

import functools
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import eqx_ckpt
from faults import workloads
from faults.damage import bits, damaged, files, report, swap
from faults.workloads import every_kind


Check = Callable[[pathlib.Path, pathlib.Path, str], None]


@pytest.fixture
def path(disk: pathlib.Path) -> pathlib.Path:
    return _saved(disk / "arrays")


@pytest.fixture
def compressed(disk: pathlib.Path) -> pathlib.Path:
    return _saved(disk / "compressed", compression="zstd")


@pytest.fixture
def database(disk: pathlib.Path) -> pathlib.Path:
    return _saved(disk / "database", layout="ocdbt")


def _saved(disk: pathlib.Path, **kwargs: Any) -> pathlib.Path:
    save = functools.partial(eqx_ckpt.tree_serialise_leaves, **kwargs)
    with workloads.small_chunks(32):
        save(disk / "new", every_kind(1))
        save(disk / "other", every_kind(2))
    return disk / "new"


def _leaves(path: pathlib.Path, place: pathlib.Path) -> list[str]:
    """The names of the leaves that a file or a folder belongs to, or that lie in it."""
    inside = f"{place.relative_to(path)}/"
    names = eqx_ckpt.inspect.read_manifest(path.with_name("other")).leaves
    return [n for n in names if inside.startswith(f"{n}/") or n.startswith(inside)]


def _check(
    path: pathlib.Path, place: pathlib.Path, damage: str, manifest: str = "The manifest"
) -> None:
    """What is said of a damage names each leaf; of a damage of the manifest, that."""
    found = report(path)
    of_manifest = place == path / "zarr.json"
    words = [manifest] if of_manifest else [f"'{n}'" for n in _leaves(path, place)]
    assert words, place
    assert not [w for w in words if w not in found], f"{damage} of {place}: {found!r}"


def _check_database(path: pathlib.Path, place: pathlib.Path, damage: str) -> None:
    # Bytes behind the end of a data file are nobody's, and nothing is restored of them.
    harmless = place.parent.name == "d" and damage in ("appending", "doubling")
    assert report(path) or harmless, f"{damage} of {place}"


def test_nothing_is_damaged(path: pathlib.Path, database: pathlib.Path) -> None:
    assert report(path) == report(database) == ""
    assert len(list((path / "chunks").glob("c.*"))) == 4
    assert len(files(path)) > 25
    assert len(files(database)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["c*", "zarr.json"])
def test_every_damage_of_every_file(path: pathlib.Path, pattern: str) -> None:
    matching = [file for file in files(path) if file.match(pattern)]
    assert len(matching) > 10
    _damage_each(path, matching)


def test_every_damage_of_compressed_chunks(compressed: pathlib.Path) -> None:
    chunks = [compressed / name for name in ("chunks/c.1.0", "f32/c.0.0")]
    _damage_each(compressed, chunks)


def test_every_damage_of_every_file_of_a_database(database: pathlib.Path) -> None:
    _damage_each(database, files(database), _check_database)


def _damage_each(
    path: pathlib.Path, some: list[pathlib.Path], check: Check = _check
) -> None:
    for file in some:
        original = file.read_bytes()
        for damage, data in damaged(original, file.name[:5]):
            file.write_bytes(data)
            check(path, file, damage)
        file.write_bytes(original)
    assert report(path) == ""


def test_swapped_compressed_chunks(compressed: pathlib.Path) -> None:
    one, two = (compressed / "chunks" / f"c.{i}.0" for i in (0, 2))
    swap(one, two)
    assert "'chunks'" in report(compressed)


def test_every_missing_file(path: pathlib.Path) -> None:
    everything = files(path)
    for file in everything:
        file.rename(path / "aside")
        _check(path, file, "removal", manifest="No committed checkpoint")
        (path / "aside").rename(file)
    assert files(path) == everything
    assert len(everything) > 25
    assert report(path) == ""


def test_every_missing_directory(path: pathlib.Path) -> None:
    folders = sorted(p for p in path.rglob("*") if p.is_dir())
    assert {path / "f32", path / "layer", path / "layer" / "twin"} < {*folders}
    for folder in folders:
        folder.rename(path.with_name("aside"))
        _check(path, folder, "removal")
        path.with_name("aside").rename(folder)
    assert report(path) == ""


def test_swapped_files(path: pathlib.Path) -> None:
    """Each file is intact, in another's place: a checksum in the file sees nothing."""
    chunks = [file for file in files(path) if file.name != "zarr.json"]
    swaps = 0
    for i, one in enumerate(chunks):
        for two in chunks[:i]:
            same_size = one.stat().st_size == two.stat().st_size
            if not same_size or one.read_bytes() == two.read_bytes():
                continue
            swap(one, two)
            found = report(path)
            for name in (*_leaves(path, one), *_leaves(path, two)):
                assert f"'{name}'" in found, f"swap of {one} and {two}: {found!r}"
            swap(one, two)
            swaps += 1
    assert swaps > 6
    assert report(path) == ""


def test_swapped_leaves(path: pathlib.Path) -> None:
    swap(path / "f32", path / "layer" / "twin")
    found = report(path)
    assert "'f32'" in found
    assert "'layer/twin'" in found


def test_files_of_another_checkpoint(path: pathlib.Path) -> None:
    replaced = 0
    for file in files(path):
        original = file.read_bytes()
        other = path.with_name("other") / file.relative_to(path)
        if other.read_bytes() == original:
            continue
        shutil.copyfile(other, file)
        _check(path, file, "replacement", manifest="'f32'")
        file.write_bytes(original)
        replaced += 1
    assert replaced > 8
    assert report(path) == ""


def test_verify_finds_every_damaged_leaf_in_one_run(path: pathlib.Path) -> None:
    names = [
        name
        for name, record in eqx_ckpt.inspect.read_manifest(path).leaves.items()
        if record.is_array
    ]
    assert len(names) > 8
    names.remove("layer/zero")
    for i, name in enumerate(names):
        victim = files(path / name)[i % 2]  # a chunk, or the metadata
        match i % 3:
            case 0:
                victim.unlink()
            case 1:
                os.truncate(victim, 1)
            case 2:
                data = victim.read_bytes()
                victim.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(eqx_ckpt.CorruptCheckpointError) as found:
        eqx_ckpt.inspect.verify(path)
    assert not [name for name in names if f"'{name}'" not in str(found.value)]
    assert "'layer/zero'" not in str(found.value)


def test_only_the_damaged_leaf_is_lost(path: pathlib.Path) -> None:
    for file in (path / "chunks").glob("c.*"):
        file.unlink()
    whole = {k: v for k, v in every_kind(0).items() if k != "chunks"}
    like = {**whole, "chunks": np.ones((8, 4), np.float32)}
    restored = eqx_ckpt.tree_deserialise_leaves(
        path, like, where=lambda t: [v for k, v in sorted(t.items()) if k != "chunks"]
    )
    expected = {**every_kind(1), "chunks": like["chunks"]}
    assert bits(restored) == bits(expected)


def test_a_damaged_manifest_is_not_an_absent_checkpoint(path: pathlib.Path) -> None:
    manifest = path / "zarr.json"
    for size in (0, 1, 10, 100, manifest.stat().st_size):
        manifest.write_bytes(bytes(size))  # the size without the data: a power cut
        with pytest.raises(eqx_ckpt.CorruptCheckpointError):
            eqx_ckpt.inspect.read_manifest(path)
    manifest.unlink()
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        eqx_ckpt.inspect.read_manifest(path)


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_a_damaged_checkpoint_can_be_replaced(
    disk: pathlib.Path, layout: eqx_ckpt.typing.Layout
) -> None:
    path = _saved(disk, layout=layout)
    for file in files(path):
        match file.name:
            case "zarr.json" if file.parent == path:
                pass
            case "zarr.json" | "manifest.ocdbt":
                file.unlink()
            case _:
                file.write_bytes(b"")
    save = functools.partial(eqx_ckpt.tree_serialise_leaves, layout=layout)
    save(path, every_kind(3), overwrite=True)
    restored = eqx_ckpt.tree_deserialise_leaves(path, every_kind(0))
    assert bits(restored) == bits(every_kind(3))
