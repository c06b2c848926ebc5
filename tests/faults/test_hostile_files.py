"""Files that are not what they seem: pipes, links, devices, and what is far too large.

Each case runs in a child of its own with bounded memory and time, see test_hostile.py.
"""

import itertools
import os
import pathlib
import shutil
from collections.abc import Callable

import pytest

import eqx_ckpt
from faults import workloads
from faults.readers import MEMORY, read_in_child, TIMEOUT
from faults.zygote import Zygote


pytestmark = pytest.mark.once


@pytest.fixture
def path(zygote: Zygote, disk: pathlib.Path) -> pathlib.Path:
    zygote.call(workloads.save, str(disk / "new"), 1)
    return disk / "new"


def _remove(place: pathlib.Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()


def _fifo(place: pathlib.Path) -> None:
    _remove(place)
    os.mkfifo(place)


def _directory(place: pathlib.Path) -> None:
    _remove(place)
    place.mkdir()


def _file(place: pathlib.Path) -> None:
    _remove(place)
    place.write_bytes(b"a file")


def _endless_device(place: pathlib.Path) -> None:
    _remove(place)
    place.symlink_to("/dev/zero")


def _link_to_itself(place: pathlib.Path) -> None:
    _remove(place)
    place.symlink_to(place)


def _link_out(place: pathlib.Path) -> None:
    """The very thing, but a symbolic link leads to it, out of the checkpoint."""
    outside = _outside(next(p for p in place.parents if p.name == "new"))
    place.rename(outside)
    place.symlink_to(outside)


def _grow(file: pathlib.Path) -> None:
    os.truncate(file, 2**40)


def _fill_with_lists(file: pathlib.Path) -> None:
    file.write_bytes(b"[" + b"[]," * (20 * 2**20) + b"0]")


FILES = [
    ("zarr", "zarr.json"),
    ("zarr", "layer/weight/zarr.json"),
    ("zarr", "layer/weight/c.1.0"),
    ("ocdbt", "manifest.ocdbt"),
]
PLACES = [*FILES, ("ocdbt", "d"), ("ocdbt", "d/*")]
CHANGES = [_fifo, _directory, _file, _endless_device, _link_to_itself, _link_out]
CASES = [
    *itertools.product(PLACES, CHANGES),
    *itertools.product(FILES, [_grow, _fill_with_lists]),
]


def _outside(path: pathlib.Path) -> pathlib.Path:
    return path.with_name("outside")


def _content(place: pathlib.Path) -> dict[pathlib.Path, bytes]:
    return {p: p.read_bytes() for p in (place, *place.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("layout", "name", "change"),
    [pytest.param(*place, change, id=f"{place[1]}-{change.__name__}")
     for place, change in CASES],
)  # fmt: skip
def test_hostile_place(
    zygote: Zygote,
    disk: pathlib.Path,
    layout: eqx_ckpt.typing.Layout,
    name: str,
    change: Callable[[pathlib.Path], None],
) -> None:
    """Every reader refuses it. A save replaces it, or leaves it as it is.

    Nothing outside of the checkpoint is touched.
    """
    path = disk / "new"
    zygote.call(workloads.save, str(path), 1, False, layout)
    place = next(path.glob(name))
    change(place)
    outside = _content(_outside(path))

    answers = read_in_child(zygote, path)
    if name == "zarr.json":
        assert "" not in answers.values()
    else:
        # A chunk is read without the metadata of its array.
        readers = ["verify", *["restore", "restore itself"] * ("zarr.json" not in name)]
        assert {answers[r] for r in readers} == {"CorruptCheckpointError"}

    save = (workloads.save, str(path), 2, True, layout)
    outcome = zygote.run(*save, memory=MEMORY, timeout=TIMEOUT)
    assert not outcome.signal
    if outcome.error is None:
        assert zygote.call(workloads.load, str(path)) == 2
    else:
        assert isinstance(outcome.error, eqx_ckpt.CheckpointError | OSError)
        assert os.path.lexists(place)
    assert _content(_outside(path)) == outside


@pytest.mark.parametrize("name", ["layer", "layer/weight"])
def test_a_directory_outside_is_not_followed(
    zygote: Zygote, path: pathlib.Path, name: str
) -> None:
    _link_out(path / name)
    answers = read_in_child(zygote, path)
    assert answers["verify"] == "CorruptCheckpointError"
    assert answers["restore"] == "CorruptCheckpointError"


def test_a_link_to_a_checkpoint_is_followed(zygote: Zygote, path: pathlib.Path) -> None:
    path.with_name("latest").symlink_to(path)
    assert set(read_in_child(zygote, path.with_name("latest")).values()) == {""}
