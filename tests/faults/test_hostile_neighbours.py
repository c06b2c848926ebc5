"""What somebody else puts where this package writes, or where TensorStore reads."""

import functools as ft
import os
import pathlib
import shutil
import threading
from collections.abc import Callable

import jax
import numpy as np
import pytest

import eqx_ckpt
from faults import races, shim, workloads
from faults.zygote import Zygote
from stores.values import bucket_at


HEX = "0123456789abcdef" * 2
LIKE = {"w": jax.ShapeDtypeStruct((3,), np.float32)}
TREE = {"w": np.arange(6, dtype=np.float32)}


def pipe(path: pathlib.Path, outside: pathlib.Path) -> None:
    os.mkfifo(path)


def link(path: pathlib.Path, outside: pathlib.Path) -> None:
    path.symlink_to(outside / "file")


def dangling(path: pathlib.Path, outside: pathlib.Path) -> None:
    path.symlink_to(outside / "new")


def folder_link(path: pathlib.Path, outside: pathlib.Path) -> None:
    path.symlink_to(outside)


def second_name(path: pathlib.Path, outside: pathlib.Path) -> None:
    os.link(outside / "file", path)


def folder(path: pathlib.Path, outside: pathlib.Path) -> None:
    path.mkdir()


def sparse(path: pathlib.Path, outside: pathlib.Path) -> None:
    with path.open("wb") as f:
        f.truncate(2**40)


Plant = Callable[[pathlib.Path, pathlib.Path], None]


@pytest.fixture
def outside(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/file").write_text("not ours")
    (tmp_path / "outside/0.tmp").write_text("not ours")
    return tmp_path / "outside"


def is_untouched(outside: pathlib.Path) -> bool:
    found = {p.name: p.read_text() for p in outside.iterdir()}
    return found == {"file": "not ours", "0.tmp": "not ours"}


def in_time(function: Callable[[], object]) -> BaseException | None:
    """What a function raises; it must not block."""
    raised: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


def record(path: pathlib.Path) -> None:
    with eqx_ckpt.recording.Recording(path, LIKE) as recording:
        if recording.committed:
            recording.resume({"step": 0})
        recording.extend({"w": np.ones((2, 3), np.float32)})
        recording.commit({"step": 1})


@pytest.mark.parametrize("plant", [pipe, link, dangling, folder_link, second_name])
@pytest.mark.parametrize(
    "name",
    [
        *("samples", "samples/w", "states", "writer.lock", "recording.json.tmp"),
        *("samples/w/c.0.0.tmp", "samples/w/zarr.json.tmp"),
    ],
)
def test_a_recording_stays_in_its_directory(
    tmp_path: pathlib.Path, outside: pathlib.Path, name: str, plant: Plant
) -> None:
    path = tmp_path / "recording"
    record(path)
    place = path / name
    if os.path.lexists(place):
        place.rename(tmp_path / "aside")
    plant(place, outside)
    error = in_time(lambda: record(path))
    assert is_untouched(outside)
    assert error is None or isinstance(error, eqx_ckpt.CheckpointError | OSError)
    if error is not None:
        assert str(path) in str(error)


def test_samples_elsewhere_are_not_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "recording"
    record(path)
    (path / "samples").rename(tmp_path / "elsewhere")
    (path / "samples").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="samples is a symbolic"):
        eqx_ckpt.recording.Samples(path).read()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("plant", [pipe, link, dangling, folder_link, folder])
@pytest.mark.parametrize("suffix", ["lock", "tmp"])
def test_a_sweep_goes_on(
    tmp_path: pathlib.Path, outside: pathlib.Path, suffix: str, plant: Plant
) -> None:
    """It opens no planted lock, and removes what else dead saves have left."""
    run = tmp_path / "run"
    run.mkdir()
    plant(run / f".000001.{HEX}.{suffix}", outside)
    if suffix == "lock":
        (run / f".000001.{HEX}.tmp").mkdir()
    dead = run / f".000002.{HEX}.tmp"
    dead.mkdir()
    listed: list[str] = []
    assert (
        in_time(
            lambda: listed.extend(eqx_ckpt.inspect.garbage_collect(run, dry_run=True))
        )
        is None
    )
    assert str(dead) in listed
    assert in_time(lambda: eqx_ckpt.inspect.garbage_collect(run)) is None
    assert not dead.exists()
    assert in_time(lambda: eqx_ckpt.CheckpointManager(run).close()) is None
    assert is_untouched(outside)


@pytest.mark.parametrize("plant", [pipe, link, sparse])
@pytest.mark.parametrize(
    ("layout", "name"),
    [("zarr", "w/c.0"), ("zarr", "w/zarr.json"), ("zarr", "w")]
    + [("ocdbt", "manifest.ocdbt"), ("ocdbt", "d/*")],
)
def test_arrays_of_other_programs(
    tmp_path: pathlib.Path,
    outside: pathlib.Path,
    layout: eqx_ckpt.typing.Layout,
    name: str,
    plant: Plant,
) -> None:
    """TensorStore is not asked to open a pipe, a link, or more than fits in memory."""
    path = tmp_path / "arrays"
    eqx_ckpt.tree_serialise_leaves(path, TREE, layout=layout)
    (path / "zarr.json").unlink()
    place = next(path.glob(name))
    place.rename(tmp_path / "aside")
    plant(place, outside)

    def read() -> None:
        assert (
            list(eqx_ckpt.inspect.iter_leaves(eqx_ckpt.interop.open_jax_arrays(path)))
            == []
        )

    error = in_time(read)
    assert isinstance(error, eqx_ckpt.CheckpointError), error
    assert str(path) in str(error)


@pytest.mark.parametrize("folder", ["", "above", "above/run"])
def test_a_pipe_in_place_of_a_manifest_above(
    tmp_path: pathlib.Path, folder: str
) -> None:
    """Whoever looks for a checkpoint above a path does not wait for it."""
    run = tmp_path / "above" / "run"
    run.mkdir(parents=True)
    os.mkfifo(tmp_path / folder / "zarr.json")
    step = run / "000001"
    for function in (
        lambda: eqx_ckpt.tree_deserialise_leaves(step, TREE),
        lambda: eqx_ckpt.interop.open_source(run),
        lambda: eqx_ckpt.CheckpointManager(run).latest(),
        lambda: eqx_ckpt.tree_serialise_leaves(step, TREE),
        lambda: eqx_ckpt.inspect.verify(step),
    ):
        error = in_time(function)
        assert error is None or isinstance(error, eqx_ckpt.CheckpointError), error


def test_data_elsewhere_are_not_read(tmp_path: pathlib.Path) -> None:
    """The manifest of a copy from a store names a folder, which may be no link."""
    url, path = f"memory://{tmp_path.name}", tmp_path / "copy"
    eqx_ckpt.tree_serialise_leaves(url, TREE)
    base = bucket_at(url)
    for key in base.list_keys():
        (path / key).parent.mkdir(parents=True, exist_ok=True)
        (path / key).write_bytes(base.read(key) or b"")
    assert eqx_ckpt.inspect.verify(path)
    (data,) = path.glob("@*")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    for function in (
        lambda: eqx_ckpt.tree_deserialise_leaves(path, TREE),
        lambda: eqx_ckpt.inspect.verify(path),
        lambda: list(eqx_ckpt.inspect.iter_leaves(path)),
        lambda: eqx_ckpt.copy(path, tmp_path / "other"),
    ):
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="symbolic link"):
            function()


def swap_at(
    disk: str, overwrite: bool, layout: eqx_ckpt.typing.Layout, first: int, last: int
) -> int:
    """Swap the hidden directory of a save at a stop, until another one; look after."""
    run, elsewhere = pathlib.Path(disk, "run"), pathlib.Path(disk, "elsewhere")
    path = str(run / "new")
    shutil.copytree(pathlib.Path(disk, "template"), run)
    elsewhere.mkdir()
    fault = shim.Fault(str(run), 1, "STOP", for_ever=True)
    racer = races.Racer(fault, (workloads.save, (path, 1, overwrite, layout)))
    error, stops = races.swap_meanwhile(racer, path, str(elsewhere), first, last)
    assert os.listdir(elsewhere) == [], (first, last, error)
    if error is None:
        assert workloads.load(path) == 1
    else:
        assert isinstance(error, eqx_ckpt.CheckpointError | OSError)
        assert ".new" in str(error), (first, last, error)
        if not os.path.islink(path):
            assert workloads.load(path) == (0 if overwrite else None)
    shutil.rmtree(run)
    elsewhere.rmdir()
    return stops


@pytest.mark.parametrize(("layout", "overwrite"), [("zarr", True), ("ocdbt", False)])
def test_a_save_whose_directory_is_swapped(
    zygote: Zygote,
    disk: pathlib.Path,
    layout: eqx_ckpt.typing.Layout,
    overwrite: bool,
) -> None:
    """For a link, before each of its operations, for one of them or for all.

    Nothing is written through the link, and what was saved is whole.
    """
    (disk / "template").mkdir()
    if overwrite:
        zygote.call(workloads.save, str(disk / "template/new"), 0, False, layout)
    swap = ft.partial(zygote.call, swap_at, str(disk), overwrite, layout)
    stops = swap(0, 0)
    assert stops > 10
    for first in range(1, stops + 1):
        for last in (first + 1, stops + 1):
            swap(first, last)
