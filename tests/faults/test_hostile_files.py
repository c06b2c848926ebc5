"""Files that are not what they seem: pipes, links, devices, and what is far too large.

Each case runs in a child of its own with bounded memory and time, see test_hostile.py.
"""

import os
import pathlib
from collections.abc import Callable

import pytest

from eqx_ckpt import CheckpointError
from faults import workloads
from faults.readers import DEADLINE, MEMORY, read_in_child
from faults.zygote import Zygote


@pytest.fixture
def path(zygote: Zygote, disk: pathlib.Path) -> pathlib.Path:
    zygote.call(workloads.save, str(disk / "new"), 1)
    return disk / "new"


def _replace_by_fifo(file: pathlib.Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _replace_by_directory(file: pathlib.Path) -> None:
    file.unlink()
    file.mkdir()


def _replace_by_endless_device(file: pathlib.Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _replace_by_link_to_itself(file: pathlib.Path) -> None:
    file.unlink()
    file.symlink_to(file)


def _move_out(file: pathlib.Path) -> None:
    """The very file, but a symbolic link leads to it, out of the checkpoint."""
    outside = file.parents[len(file.parts) - 5] / "outside"
    file.rename(outside)
    file.symlink_to(outside)


def _grow(file: pathlib.Path) -> None:
    os.truncate(file, 2**40)


def _fill_with_lists(file: pathlib.Path) -> None:
    file.write_bytes(b"[" + b"[]," * (20 * 2**20) + b"0]")


FILES = [
    _replace_by_fifo,
    _replace_by_directory,
    _replace_by_endless_device,
    _replace_by_link_to_itself,
    _move_out,
    _grow,
    _fill_with_lists,
]


@pytest.mark.parametrize("name", ["layer/weight/c.1.0", "layer/weight/zarr.json"])
@pytest.mark.parametrize("change", FILES)
def test_hostile_file(
    zygote: Zygote,
    path: pathlib.Path,
    change: Callable[[pathlib.Path], None],
    name: str,
) -> None:
    change(path / name)
    answers = read_in_child(zygote, path)
    assert answers["verify"] == "CorruptCheckpointError"
    if "zarr.json" not in name:
        assert answers["restore"] == "CorruptCheckpointError"
        assert answers["restore itself"] == "CorruptCheckpointError"


@pytest.mark.parametrize("change", FILES)
def test_hostile_manifest_file(
    zygote: Zygote, path: pathlib.Path, change: Callable[[pathlib.Path], None]
) -> None:
    change(path / "zarr.json")
    assert "" not in read_in_child(zygote, path).values()


@pytest.mark.parametrize(
    "name", ["zarr.json", "layer/weight/zarr.json", "layer/weight/c.1.0"]
)
@pytest.mark.parametrize("change", FILES)
def test_overwrite_what_is_hostile(
    zygote: Zygote,
    path: pathlib.Path,
    change: Callable[[pathlib.Path], None],
    name: str,
) -> None:
    """It is replaced, or it stays as it is; nothing outside of it is touched."""
    change(path / name)
    outside = path.with_name("outside")
    before = outside.read_bytes() if outside.exists() else None
    save = (workloads.save, str(path), 2, True)
    outcome = zygote.run(*save, memory=MEMORY, deadline=DEADLINE)
    assert not outcome.signal
    if outcome.error is None:
        assert zygote.call(workloads.load, str(path)) == 2
    else:
        assert isinstance(outcome.error, CheckpointError | OSError), outcome.error
        assert os.path.lexists(path / name)
    assert (outside.read_bytes() if outside.exists() else None) == before


@pytest.mark.parametrize("name", ["layer", "layer/weight"])
def test_a_directory_outside_is_not_followed(
    zygote: Zygote, path: pathlib.Path, name: str
) -> None:
    outside = path.with_name("outside")
    (path / name).rename(outside)
    (path / name).symlink_to(outside)
    answers = read_in_child(zygote, path)
    assert answers["verify"] == "CorruptCheckpointError"
    assert answers["restore"] == "CorruptCheckpointError"


def test_a_link_to_a_checkpoint_is_followed(zygote: Zygote, path: pathlib.Path) -> None:
    path.with_name("latest").symlink_to(path)
    assert set(read_in_child(zygote, path.with_name("latest")).values()) == {""}
