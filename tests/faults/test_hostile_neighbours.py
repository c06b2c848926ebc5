"""What somebody else puts where this package writes, or where TensorStore reads."""

import functools as ft
import glob
import os
import pathlib
import shutil
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import eqx_ckpt
from faults import exports, races, shim, workloads
from faults.zygote import OF_MANY, Zygote
from stores.values import bucket_at
from support import delete


pytestmark = pytest.mark.once


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


class Swap(NamedTuple):
    """What takes the place of a directory at a stop, until another one."""

    kind: str
    first: int
    last: int

    def play(
        self, disk: str, call: races.Call, find: Callable[[], str]
    ) -> tuple[Any, int]:
        """What a call returns, and the number of its stops; nothing goes elsewhere."""
        run, elsewhere = pathlib.Path(disk, "run"), pathlib.Path(disk, "elsewhere")
        shutil.copytree(pathlib.Path(disk, "template"), run)
        elsewhere.mkdir()
        aside = elsewhere
        if self.kind == "link":
            aside = pathlib.Path(disk, "aside")
            aside.symlink_to(elsewhere)
        inode = elsewhere.stat().st_ino
        racer = races.Racer(shim.Fault(str(run), 1, "STOP", for_ever=True), call)
        args = (racer, find, str(aside), self.first, self.last)
        answer, stops = races.swap_meanwhile(*args)
        folders = {os.stat(f).st_ino: f for f, _, _ in os.walk(disk)}
        if inode in folders:
            # Of a recording, a state is saved by its path.
            assert {*os.listdir(folders[inode])} <= {"states"}, (self, answer)
        return answer, stops


def swap_at(
    disk: str, overwrite: bool, layout: eqx_ckpt.typing.Layout, swap: Swap
) -> int:
    """Swap the hidden directory of a save; look after."""
    path = f"{disk}/run/new"
    call = workloads.save, (path, 1, overwrite, layout)
    error, stops = swap.play(disk, call, ft.partial(hidden_beside, path))
    if error is None:
        assert workloads.load(path) == 1, swap
    else:
        assert isinstance(error, eqx_ckpt.CheckpointError | OSError), swap
        assert ".new" in str(error), (swap, error)
        assert workloads.load(path) == (0 if overwrite else None), (swap, error)
    clear(disk)
    return stops


def hidden_beside(path: str) -> str:
    directory, name = os.path.split(path)
    return next(iter(glob.glob(f"{directory}/.{name}.*.tmp")), "")


def clear(disk: str) -> None:
    for name in ("run", "elsewhere", "aside"):
        delete(f"{disk}/{name}")


def swap_at_each(
    swap: Callable[[Swap], int], for_a_moment: str, to_the_end: str, distance: int = 1
) -> None:
    stops = swap(Swap(for_a_moment, 0, 0))
    assert stops > 10
    for first in range(1, stops + 1, distance):
        swap(Swap(for_a_moment, first, first + 1))
        swap(Swap(to_the_end, first, stops + 1))


@pytest.mark.parametrize(
    ("layout", "overwrite", "kinds"),
    [
        ("zarr", True, ("directory", "link")),
        ("ocdbt", False, ("link", "directory")),
    ],
)
def test_a_save_whose_directory_is_swapped(
    zygote: Zygote,
    disk: pathlib.Path,
    layout: eqx_ckpt.typing.Layout,
    overwrite: bool,
    kinds: tuple[str, str],
) -> None:
    """Before each of its operations, for one of them or for all.

    Nothing is written elsewhere, and what was saved is whole.
    """
    (disk / "template").mkdir()
    if overwrite:
        zygote.call(workloads.save, str(disk / "template/new"), 0, False, layout)
    swap = ft.partial(zygote.call, swap_at, str(disk), overwrite, layout)
    swap_at_each(swap, *kinds)


def record_more(path: str) -> None:
    with eqx_ckpt.recording.Recording(path, LIKE) as recording:
        recording.resume({"step": 0})
        pathlib.Path(path).with_name("opened").touch()
        recording.extend({"w": np.ones((2, 3), np.float32)})
        recording.commit({"step": 2})


def swap_recording(disk: str, swap: Swap) -> int:
    """Swap the directory of a recording once it is open; look after."""
    run = pathlib.Path(disk, "run")
    path = run / "recording"
    call = record_more, (str(path),)
    error, stops = swap.play(
        disk, call, lambda: str(path) if (run / "opened").exists() else ""
    )
    places = [p for p in (path, run.parent / "aside", run.parent / "elsewhere")]
    (place,) = [p for p in places if (p / "recording.json").is_file()]
    count = len(eqx_ckpt.recording.Samples(place).read()["w"])
    if error is None:
        assert count == 4, swap
    else:
        assert isinstance(error, eqx_ckpt.CheckpointError | OSError), swap
        assert str(path) in str(error), (swap, error)
        assert count in (2, 4), (swap, error)
    with eqx_ckpt.recording.Recording(place, LIKE) as recording:
        assert recording.resume({"step": 0}) == {"step": count // 2}, (swap, error)
    clear(disk)
    return stops


def test_a_recording_whose_directory_is_swapped(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    """As a save; no commit refers to a state that is elsewhere."""
    zygote.call(record, disk / "template/recording")
    swap = ft.partial(zygote.call, swap_recording, str(disk))
    swap_at_each(swap, "directory", "link")


def swap_export(disk: str, swap: Swap) -> int:
    """Swap the hidden directory of an export to Orbax; look after."""
    path = f"{disk}/run/orbax"
    call = exports.WRITERS["orbax"], (f"{disk}/source", path)
    error, stops = swap.play(disk, call, ft.partial(hidden_beside, path))
    if os.path.exists(path):
        source = eqx_ckpt.interop.open_orbax(path)
        assert exports.seed_of(source) == 1, (swap, error)
    else:
        assert isinstance(error, eqx_ckpt.CheckpointError | OSError), (swap, error)
    clear(disk)
    return stops


@pytest.mark.slow
def test_an_export_whose_directory_is_swapped(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    """Before some of the operations of Orbax."""
    pytest.importorskip("orbax.checkpoint")
    (disk / "template").mkdir()
    zygote.call(workloads.save, str(disk / "source"), 1, False)
    swap = ft.partial(zygote.call, swap_export, str(disk), timeout=OF_MANY)
    swap_at_each(swap, "directory", "link", 23)
