"""Places where no checkpoint is or can be: a typed error, and nothing is changed."""

import errno
import os
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import eqx_ckpt
from faults import readers, workloads
from faults.powercut import unmount
from faults.zygote import Outcome, Zygote


NOBODY = 65534


def _contents(directory: pathlib.Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(directory)): p.read_bytes() if p.is_file() else None
        for p in directory.rglob("*")
    }


def _nothing(path: pathlib.Path) -> None:
    pass


def _file(path: pathlib.Path) -> None:
    path.write_bytes(b"a file")


def _broken_link(path: pathlib.Path) -> None:
    path.symlink_to("nowhere")


def _photos(path: pathlib.Path) -> None:
    path.mkdir()
    (path / "photo.jpg").write_bytes(b"a photo")


def _zarr_group(path: pathlib.Path) -> None:
    path.mkdir()
    (path / "zarr.json").write_text(
        '{"zarr_format": 3, "node_type": "group", "attributes": {"a": 1}}'
    )


def _unfinished(path: pathlib.Path) -> None:
    eqx_ckpt.tree_serialise_leaves(path, workloads.tree(1))
    (path / "zarr.json").unlink()


Make = Callable[[pathlib.Path], None]
THINGS = [_file, _photos, _zarr_group, _unfinished]


@pytest.mark.parametrize("make", [_nothing, _broken_link, *THINGS])
def test_restore_where_no_checkpoint_is(disk: pathlib.Path, make: Make) -> None:
    path = disk / "place"
    make(path)
    before = _contents(disk)
    for reader, answer in readers.read_each_way(str(path)).items():
        assert answer == "CheckpointNotFoundError", reader
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="place|nowhere"):
        eqx_ckpt.inspect.read_manifest(path)
    assert _contents(disk) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("make", THINGS)
def test_save_where_something_else_is(
    disk: pathlib.Path, make: Make, overwrite: bool
) -> None:
    path = disk / "place"
    make(path)
    before = _contents(disk)
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="place"):
        eqx_ckpt.tree_serialise_leaves(path, workloads.tree(2), overwrite=overwrite)
    assert _contents(disk) == before


def test_save_where_a_checkpoint_is(disk: pathlib.Path) -> None:
    eqx_ckpt.tree_serialise_leaves(disk / "new", workloads.tree(1))
    before = _contents(disk)
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="overwrite=True"):
        eqx_ckpt.tree_serialise_leaves(disk / "new", workloads.tree(2))
    assert _contents(disk) == before


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("zarr", "notes.txt"),
        ("zarr", "manifest.ocdbt"),
        ("ocdbt", "notes.txt"),
        ("ocdbt", "d/notes.txt"),
        ("ocdbt", "d2"),
    ],
)
def test_foreign_files_in_a_checkpoint_are_not_deleted(
    disk: pathlib.Path, layout: eqx_ckpt.typing.Layout, name: str
) -> None:
    eqx_ckpt.tree_serialise_leaves(disk / "new", workloads.tree(1), layout=layout)
    (disk / "new" / name).write_text("the best run of all")
    before = _contents(disk)
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match=name):
        eqx_ckpt.tree_serialise_leaves(disk / "new", workloads.tree(2), overwrite=True)
    assert _contents(disk) == before


def test_save_below_a_file(disk: pathlib.Path) -> None:
    (disk / "file").write_bytes(b"a file")
    with pytest.raises(NotADirectoryError):
        eqx_ckpt.tree_serialise_leaves(disk / "file" / "new", workloads.tree(1))
    assert _contents(disk) == {"file": b"a file"}


def _as_nobody(function: Callable[..., Any], *args: Any) -> Any:
    if os.geteuid() == 0:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    return function(*args)


def _assert_errno(outcome: Outcome, number: int) -> None:
    assert isinstance(outcome.error, OSError), repr(outcome.error)
    assert outcome.error.errno == number, repr(outcome.error)


def test_save_without_permission(zygote: Zygote, disk: pathlib.Path) -> None:
    disk.chmod(0o555)
    outcome = zygote.run(_as_nobody, workloads.save, str(disk / "new"), 1)
    disk.chmod(0o700)
    _assert_errno(outcome, errno.EACCES)
    assert "new" in str(outcome.error)
    assert _contents(disk) == {}


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *(("zarr", n) for n in ("", "zarr.json", "layer/weight", "layer/bias/c.0")),
        *(("ocdbt", n) for n in ("", "zarr.json", "manifest.ocdbt", "d")),
    ],
)
def test_restore_without_permission(
    zygote: Zygote, disk: pathlib.Path, layout: eqx_ckpt.typing.Layout, name: str
) -> None:
    zygote.call(workloads.save, str(disk / "new"), 1, False, layout)
    disk.chmod(0o755)
    (disk / "new" / name).chmod(0)
    outcome = zygote.run(_as_nobody, workloads.load, str(disk / "new"))
    (disk / "new" / name).chmod(0o700)
    _assert_errno(outcome, errno.EACCES)


def test_a_file_of_numpy_without_permission(zygote: Zygote, disk: pathlib.Path) -> None:
    path = disk / "arrays.npz"
    np.savez(path, w=np.ones(3))
    disk.chmod(0o755)
    path.chmod(0)
    outcome = zygote.run(_as_nobody, eqx_ckpt.interop.open_source, str(path))
    _assert_errno(outcome, errno.EACCES)
    outcome = zygote.run(_as_nobody, eqx_ckpt.tree_like, str(path))
    assert "It cannot be read: Permission denied." in str(outcome.error)


@pytest.fixture
def small_disk(disk: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of one megabyte."""
    small = disk / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as e:
        reason = getattr(e, "stderr", "") or str(e)
        pytest.skip(f"no small disk here: {reason.splitlines()[0]}")
    yield small
    unmount(small)


def _free(directory: pathlib.Path) -> int:
    return os.statvfs(directory).f_bfree


def _assert_free(directory: pathlib.Path, blocks: int) -> None:
    """A thread of TensorStore may close a deleted file a moment later."""
    for _ in range(600):
        if _free(directory) == blocks:
            return
        time.sleep(0.05)
    assert _free(directory) == blocks


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_disk_full(
    small_disk: pathlib.Path, overwrite: bool, layout: eqx_ckpt.typing.Layout
) -> None:
    eqx_ckpt.tree_serialise_leaves(small_disk / "old", workloads.tree(1))
    free, before = _free(small_disk), _contents(small_disk)
    large = {f"leaf{i}": np.full(200_000, i, np.uint8) for i in range(10)}
    path = small_disk / ("old" if overwrite else "new")
    for _ in range(3):
        with pytest.raises(OSError, match="No space left on device") as failed:
            eqx_ckpt.tree_serialise_leaves(
                path, large, overwrite=overwrite, layout=layout
            )
        assert failed.value.errno == errno.ENOSPC
        if layout == "zarr":
            assert "no longer needed, and save again" in str(failed.value)
        assert _contents(small_disk) == before
        _assert_free(small_disk, free)
    assert workloads.load(small_disk / "old") == 1
    eqx_ckpt.tree_serialise_leaves(path, workloads.tree(2), overwrite=overwrite)
    assert workloads.load(path) == 2


def test_read_only_disk(small_disk: pathlib.Path) -> None:
    eqx_ckpt.tree_serialise_leaves(small_disk / "old", workloads.tree(1))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert workloads.load(small_disk / "old") == 1
    with pytest.raises(OSError, match="Read-only file system") as failed:
        eqx_ckpt.tree_serialise_leaves(small_disk / "new", workloads.tree(1))
    assert failed.value.errno == errno.EROFS
