"""A database that is damaged at rest: reported, and never restored as other values."""

import pathlib
import shutil

import pytest

import eqx_ckpt
from faults import workloads
from faults.damage import damaged, files, report, swap
from faults.databases import set_options
from faults.workloads import every_kind
from support import Directory, locate, Memory


ARRAYS = [name for name, leaf in every_kind(1).items() if hasattr(leaf, "dtype")]


def _save(path: pathlib.Path | str, seed: int) -> None:
    with workloads.small_chunks(32):
        eqx_ckpt.tree_serialise_leaves(path, every_kind(seed), layout="ocdbt")


@pytest.fixture
def path(disk: pathlib.Path) -> pathlib.Path:
    for seed, name in ((1, "new"), (2, "other")):
        _save(disk / name, seed)
    return disk / "new"


@pytest.fixture
def of_many_files(disk: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A database that several transactions have written."""
    set_options(monkeypatch, Directory, max_transaction=300)
    _save(disk / "new", 1)
    return disk / "new"


def _database(path: pathlib.Path) -> list[pathlib.Path]:
    return [file for file in files(path) if file.name != "zarr.json"]


def test_damage_of_old_versions_is_never_restored(of_many_files: pathlib.Path) -> None:
    """Some of their bytes nobody reads any more; `report` sees that nobody does."""
    database = _database(of_many_files)
    assert len(database) > 8
    manifests = {file for file in database if file.name.startswith("manifest")}
    found = 0
    # The names of the others are random, and so is which of them are still read.
    for file in {*database[::8]} | manifests:
        original = file.read_bytes()
        for _, data in damaged(original, file.name[:2]):
            file.write_bytes(data)
            found += bool(report(of_many_files))
        file.write_bytes(original)
    assert found > len(manifests) > 0


def test_a_lost_data_file_is_not_an_empty_array(of_many_files: pathlib.Path) -> None:
    named: set[str] = set()
    for file in _database(of_many_files):
        data = file.read_bytes()
        file.unlink()
        found = report(of_many_files)
        named |= {name for name in ARRAYS if f"'{name}'" in found}
        file.write_bytes(data)
    assert named == {*ARRAYS}
    assert report(of_many_files) == ""


def test_a_lost_object_is_not_an_empty_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorStore reads a value whose object is gone as one of no bytes."""
    set_options(monkeypatch, Memory, max_transaction=300)
    url = "memory://lost-objects"
    _save(url, 1)
    place = locate(url)
    named: set[str] = set()
    for key in [key for key in place.list_keys() if "/d/" in key]:
        data = place.read(key)
        place.delete([key])
        found = report(url)
        named |= {name for name in ARRAYS if f"'{name}'" in found}
        place.write(key, data)
    assert named == {*ARRAYS}
    assert report(url) == ""


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d"])
def test_all_leaves_are_named(path: pathlib.Path, name: str) -> None:
    (path / name).rename(path.with_name("aside"))
    found = report(path)
    assert not [leaf for leaf in ARRAYS if f"'{leaf}'" not in found]


def test_files_of_another_checkpoint(path: pathlib.Path) -> None:
    other = path.with_name("other")
    for name in ("zarr.json", "manifest.ocdbt", "d"):
        swap(path / name, other / name)
        assert report(path), name
        swap(path / name, other / name)
    assert report(path) == ""
    for name in ("manifest.ocdbt", "d"):
        swap(path / name, other / name)
    found = report(path)
    assert "'f32'" in found
    assert "'chunks'" in found


def test_the_data_of_another_checkpoint(path: pathlib.Path) -> None:
    """Each name stays, and the files are intact."""
    one, two = (next((p / "d").iterdir()) for p in (path, path.with_name("other")))
    shutil.copyfile(two, one)
    assert report(path)


def test_an_older_database_at_the_same_place(path: pathlib.Path) -> None:
    """It is complete, of the same leaves, and this process has read it before."""
    assert report(path) == ""
    for name in ("manifest.ocdbt", "d"):
        swap(path / name, path.with_name("other") / name)
    assert report(path)
