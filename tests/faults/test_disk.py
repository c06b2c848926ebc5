"""Places where no checkpoint is or can be: a typed error, and nothing is changed."""

import errno
import gc
import os
import pathlib
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest

import eqx_ckpt
from faults import failing_jobs, jobs, readers, workloads
from faults.powercut import unmount
from faults.zygote import Outcome, Zygote
from helpers import wait_for_uploads
from support import free_space, uploader


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
    gc.collect()  # The error of a save leads to a manager, which has a file open.
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
    """It is full in the middle: how far data are compressed was not known before."""
    eqx_ckpt.tree_serialise_leaves(small_disk / "old", workloads.tree(1))
    free, before = _free(small_disk), _contents(small_disk)
    noise = np.random.default_rng(0).integers(256, size=(10, 200_000), dtype=np.uint8)
    large = {f"leaf{i}": part for i, part in enumerate(noise)}
    path = small_disk / ("old" if overwrite else "new")
    for _ in range(3):
        with pytest.raises(OSError, match="No space left on device") as failed:
            eqx_ckpt.tree_serialise_leaves(
                path, large, overwrite=overwrite, layout=layout, compression="zstd"
            )
        assert failed.value.errno == errno.ENOSPC
        if layout == "zarr":
            assert "no longer needed, and save again" in str(failed.value)
        assert _contents(small_disk) == before
        _assert_free(small_disk, free)
    assert workloads.load(small_disk / "old") == 1
    eqx_ckpt.tree_serialise_leaves(path, workloads.tree(2), overwrite=overwrite)
    assert workloads.load(path) == 2


def _is_compressed(name: str, record: object) -> Literal["zstd"] | None:
    return "zstd" if name == "a" else None


@pytest.mark.once
@pytest.mark.parametrize("compression", [None, "zstd", _is_compressed])
@pytest.mark.parametrize("kind", ["zarr", "ocdbt", "incremental"])
def test_a_save_that_surely_does_not_fit_does_not_begin(
    small_disk: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    compression: eqx_ckpt.typing.Compression,
) -> None:
    """Beside what comes of the same save when nobody asks how much is free."""
    monkeypatch.setattr(free_space, "_PAUSES", ())
    chance = random.Random(f"{kind}, {compression is None}, {callable(compression)}")
    how: dict[str, Any] = {"incremental": True}
    if kind != "incremental":
        how = {"layout": kind}
    keep = eqx_ckpt.keep_last(2)
    seen: list[str] = []
    (small_disk / "run").mkdir()
    with eqx_ckpt.CheckpointManager(
        small_disk / "run", keep=keep, compression=compression, **how
    ) as manager:
        for step in range(20):
            sizes = {name: chance.choice([90, 90_000, 400_000]) for name in "abc"}
            noise = np.random.default_rng(chance.choice([0, step]))
            tree = {name: noise.bytes(size) for name, size in sizes.items()}
            tree = {name: np.frombuffer(data, "u1") for name, data in tree.items()}
            free, before = _free(small_disk), _contents(small_disk)
            seen.append(_outcome(manager, step, tree))
            if compression is None and kind != "incremental":
                needed = sum(size for size in sizes.values() if size > 90)
                blocks = needed / os.statvfs(small_disk).f_frsize
                assert (seen[-1] == "did not begin") == (blocks > free)
            if seen[-1] == "saved":
                continue
            assert _contents(small_disk) == before
            _assert_free(small_disk, free)
            if seen[-1] == "did not begin":
                with monkeypatch.context() as patch:
                    patch.setattr(free_space, "_free_bytes", lambda *_: None)
                    assert _outcome(manager, step, tree) == "full"
                _assert_free(small_disk, free)
            if chance.random() < 0.5:
                for oldest in manager.steps()[:1]:
                    manager.delete(oldest)
    assert len({*seen}) >= 2


def test_the_config_does_not_fit(small_disk: pathlib.Path) -> None:
    """The error says which file it is."""
    (small_disk / "filler").write_bytes(bytes(1_000_000))
    config = {f"{i:06}": i for i in range(20_000)}
    with eqx_ckpt.CheckpointManager(small_disk / "run", config=config) as manager:
        with pytest.raises(OSError, match="delete what is no longer") as failed:
            manager.save(1, {"n": 1}).result()
        assert "/run/config." in str(failed.value)
        (small_disk / "filler").unlink()
        manager.save(1, {"n": 1}).result()
    assert eqx_ckpt.inspect.read_config(small_disk / "run") == config


def test_the_processes_of_a_job_survive_a_full_disk(
    zygote: Zygote, small_disk: pathlib.Path
) -> None:
    """They all get the same answer, and none waits."""
    run = str(small_disk / "run")
    first, second = zygote.call(
        jobs.values, 2, 4, failing_jobs.survive_a_full_disk, run
    )
    fits, full = (False, ""), (False, "OSError")
    expected = [fits, full, full, fits, full, full, full, (True, "OSError")]
    for of_process in (first, second):
        assert [found[:2] for found in of_process] == [*expected, (True, "")]
        for _, kind, text in of_process:
            assert not kind or ("at least" in text and "`keep`" in text)


def test_a_mirror_that_is_full(
    small_disk: pathlib.Path, disk: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training goes on; the step is uploaded when there is room."""
    monkeypatch.setattr(free_space, "_PAUSES", ())
    monkeypatch.setattr(uploader, "PAUSES", (0.001,))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(900_000))
    mirror = eqx_ckpt.Mirror(small_disk / "there")
    with eqx_ckpt.CheckpointManager(disk / "run", mirror=mirror) as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.full(50_000, step)}).result()
        end = time.monotonic() + 300
        while manager.upload_error is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        assert "Delete what is no longer needed there" in str(manager.upload_error)
        assert manager.steps() == [1, 2]
        filler.unlink()
        assert manager.uploads()[2].result(300) is None
        assert 2 in manager.mirrored()


def _save_two(
    manager: eqx_ckpt.CheckpointManager, tree: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Save steps 1 and 2; step 1 is uploaded meanwhile, and so it is not removed."""
    began, may_go_on = threading.Event(), threading.Event()
    upload = uploader.upload

    def upload_later(*args: Any) -> None:
        began.set()
        assert may_go_on.wait(300)
        upload(*args)

    with monkeypatch.context() as patch:
        patch.setattr(uploader, "upload", upload_later)
        manager.save(1, tree).result()
        assert began.wait(300)
        manager.save(2, tree).result()
        may_go_on.set()
        for step in (1, 2):
            manager.uploads()[step].result(300)


def test_what_an_upload_has_spared_makes_room(
    small_disk: pathlib.Path, disk: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is space for two steps, as `keep` needs, and not for a third one."""
    mirror, run = eqx_ckpt.Mirror(disk / "there"), small_disk / "run"
    with eqx_ckpt.CheckpointManager(
        run, keep=eqx_ckpt.keep_last(1), mirror=mirror, on_error="warn"
    ) as manager:
        wait_for_uploads(disk)
        _save_two(manager, {"w": np.zeros(50_000)}, monkeypatch)
        assert sorted(os.listdir(run))[:2] == ["000001", "000002"]
        for step in (3, 4):
            manager.save(step, {"w": np.full(50_000, step)}).result()
            manager.uploads()[step].result(300)
        assert manager.mirrored() == [1, 2, 3, 4]


def test_room_on_a_disk_of_its_own(small_disk: pathlib.Path) -> None:
    """There is space for two steps, and an earlier manager has kept both."""

    def save(*steps: int, **how: Any) -> list[int]:
        with eqx_ckpt.CheckpointManager(
            small_disk / "run", shared=False, **how
        ) as manager:
            for step in steps:
                manager.save(step, {"w": np.full(50_000, step)}).result()
            return manager.steps()

    assert save(1, 2) == [1, 2]
    with pytest.raises(OSError, match="at least") as error:
        save(3)
    assert error.value.errno == errno.ENOSPC
    assert save(3, 4, keep=eqx_ckpt.keep_last(1)) == [4]


def test_what_an_upload_has_spared_goes_after_a_failure(
    small_disk: pathlib.Path, disk: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far data are compressed is not known before."""
    noise = np.random.default_rng(0).integers(256, size=400_000, dtype=np.uint8)
    with eqx_ckpt.CheckpointManager(
        small_disk / "run",
        keep=eqx_ckpt.keep_last(1),
        mirror=eqx_ckpt.Mirror(disk / "there"),
        compression="zstd",
        on_error="warn",
    ) as manager:
        wait_for_uploads(disk)
        _save_two(manager, {"w": noise}, monkeypatch)
        outcomes = [manager.save(step, {"w": noise}).exception() for step in (3, 4)]
        assert isinstance(outcomes[0], OSError)
        assert outcomes[1] is None
        assert manager.steps() == [1, 2, 4]


def _outcome(manager: eqx_ckpt.CheckpointManager, step: int, tree: Any) -> str:
    try:
        manager.save(step, tree).result()
    except OSError as e:
        error = e
    else:
        return "saved"
    assert error.errno == errno.ENOSPC
    if "at least" not in str(error):
        return "full"
    assert f"{step:06}" in str(error)
    for before in manager.steps()[:1]:  # All are kept, or this one goes.
        assert f"{before} (" in str(error)
    return "did not begin"


def test_read_only_disk(small_disk: pathlib.Path) -> None:
    eqx_ckpt.tree_serialise_leaves(small_disk / "old", workloads.tree(1))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert workloads.load(small_disk / "old") == 1
    with pytest.raises(OSError, match="Read-only file system") as failed:
        eqx_ckpt.tree_serialise_leaves(small_disk / "new", workloads.tree(1))
    assert failed.value.errno == errno.EROFS
