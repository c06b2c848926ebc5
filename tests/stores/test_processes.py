"""Several processes save and restore in an object store, and in a database."""

import functools as ft
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import eqx_ckpt
from faults import dying_jobs, jobs, programs as common
from faults.zygote import Zygote
from stores import programs, proxy
from stores.place import Place
from stores.values import bucket_at
from support import locate


pytestmark = pytest.mark.once


POINTS = ("amid the writes", "before the commit", "after the commit")


class Where(NamedTuple):
    """A place, as processes find it, and how they save there."""

    url: str
    layout: eqx_ckpt.typing.Layout
    names: dict[str, str]
    zygote: Zygote

    def run(self, processes: int, devices: int, program: Any, *args: Any) -> list[Any]:
        return self.zygote.call(
            *(jobs.values, processes, devices, programs.at, self.names, program, *args)
        )

    @property
    def keys(self) -> list[str]:
        return sorted(locate(self.url).list_keys())


@pytest.fixture
def where(request: pytest.FixtureRequest, zygote: Zygote) -> Where:
    kind, layout = request.param.split()
    if kind == "disk":
        disk: pathlib.Path = request.getfixturevalue("disk")
        return Where(f"{disk}/run", layout, {}, zygote)
    place: Place = request.getfixturevalue(kind)
    return Where(place.url, layout, programs.environment(place), zygote)


def at(*places: str, slow: tuple[str, ...] = ()) -> Callable[..., Any]:
    marked = [pytest.param(place, marks=pytest.mark.slow) for place in slow]
    return pytest.mark.parametrize("where", [*places, *marked], indirect=True)


def content(url: str) -> dict[str, bytes | None]:
    """What is at a place, whatever the prefix of its attempt."""
    base = locate(url)
    return {
        re.sub("^@[0-9a-f]{32}/", "", key): base.read(key)
        for key in base.list_keys()
        if key != "zarr.json"
    }


@at("disk ocdbt", slow=("s3 zarr", "gcs ocdbt"))
def test_restored_by_any_processes(where: Where) -> None:
    two = f"{where.url}/two"
    where.run(2, 4, common.save_and_restore, two, where.layout)
    for path in (two, f"{two}-async"):
        where.run(1, 8, common.restore_anywhere, path)
    where.run(4, 2, common.restore_anywhere, two)
    where.run(1, 1, common.restore_on_one_device, two)


@at("s3 ocdbt", "disk ocdbt")
def test_saved_by_four_processes(where: Where) -> None:
    four = f"{where.url}/four"
    where.run(4, 2, common.save, four, False, where.layout)
    where.run(2, 4, common.restore_anywhere, four)
    where.run(1, 8, common.restore_anywhere, four)


@at("s3 zarr", slow=("gcs zarr",))
def test_each_refers_to_what_it_would_write(where: Where) -> None:
    where.run(2, 4, common.save_incrementally, where.url)
    two, three = (
        eqx_ckpt.inspect.read_manifest(f"{where.url}/{step:06d}") for step in (2, 3)
    )
    (first,) = {*two.references["same"]}
    assert first.startswith("000001/@")
    always = {"object", "copies", "keys", "one"}
    assert two.references.keys() == {"same"} | always
    (second,) = {*three.references["other"]}
    assert second.startswith("000002/@")
    # The other one is cut differently, as its mesh has changed.
    assert three.references.keys() == {"other"} | always
    for step in (1, 2, 3):
        assert eqx_ckpt.inspect.verify(f"{where.url}/{step:06d}")
    # One process goes on, and deletes what the two have saved.
    tree = {"other": np.arange(128, dtype=np.float32).reshape(16, 8) + 2}
    with eqx_ckpt.CheckpointManager(where.url, incremental=True) as manager:
        manager.save(4, tree).result()
        for step in (1, 2, 3):
            manager.delete(step)
    assert eqx_ckpt.inspect.verify(f"{where.url}/000004")


def test_two_processes_write_what_one_would(s3: Place, zygote: Zygote) -> None:
    """The same objects, each of them once."""
    names = programs.environment(s3)
    for n, devices in ((2, 4), (1, 8)):
        path = f"{s3.url}/{n}"
        zygote.call(jobs.values, n, devices, programs.at, names, common.save, path)
    assert content(f"{s3.url}/2") == content(f"{s3.url}/1")
    puts = [request.path for request in s3.proxy.found("PUT", "/c[.0-9]*$")]
    assert len(puts) == len({*puts}) > 50


@at("s3 ocdbt", "disk ocdbt")
def test_each_has_a_database_of_its_own(where: Where) -> None:
    """Process 0 makes one of them, and copies nothing."""
    where.run(2, 4, common.spread, f"{where.url}/new", where.layout)
    sizes = {k: len(v or b"") for k, v in content(f"{where.url}/new").items()}
    shares = [
        sum(size for key, size in sizes.items() if key.startswith(prefix))
        for prefix in ("p0/", "p1/", "")
    ]
    nbytes = 3 * common.SPREAD_BYTES
    assert nbytes <= shares[2] < 1.02 * nbytes
    assert nbytes / 2.2 < min(shares[:2]) <= max(shares[:2]) < nbytes / 1.8


@at("s3 ocdbt", "gcs zarr", "disk ocdbt")
def test_a_run(where: Where) -> None:
    first, second = where.run(2, 4, programs.train, where.url, where.layout)
    for seen in (first, second):
        assert seen["after saving"] == [[1], [2, 3], [3, 4]]
        assert (seen["latest"], seen["best"]) == (4, 4)
        assert seen["again"][0] == "CheckpointExistsError"
        if where.layout == "zarr":
            kind, text = seen["damaged"]
            assert kind == "CorruptCheckpointError"
            assert "'w': w/c.3.0 is damaged" in text
            assert "Step 3 is intact" in text
        assert seen["at the end"] == [4, 5]
    expected = {"000004", "000005", "metric", "d", "manife"}
    assert {key[:6] for key in where.keys} <= expected


@pytest.mark.once
@pytest.mark.parametrize("index", [0, 1])
def test_what_the_store_denies_to_one(s3: Place, zygote: Zygote, index: int) -> None:
    """All of them raise, and nothing is left."""
    s3.proxy.add(proxy.answered(403), "PUT", f"/p{index}/")
    program = programs.save_what_one_cannot
    names, path = programs.environment(s3), f"{s3.url}/new"
    args = (2, 4, programs.at, names, program, path, "ocdbt")
    ends = zygote.call(jobs.values, *args)
    assert [kind for kind, _ in ends] == ["PermissionError"] * 2
    assert f"Process {index} failed: PermissionError: " in ends[1 - index][1]
    assert not locate(s3.url).list_keys()
    s3.proxy.rules.clear()
    assert zygote.call(jobs.values, *args) == [("", ""), ("", "")]
    eqx_ckpt.inspect.verify(path)


@pytest.mark.once
@at("disk ocdbt", slow=("s3 zarr",))
@pytest.mark.parametrize("who", [0, 1])
def test_kill_one_process(where: Where, who: int) -> None:
    """The older step is intact, no half of the new one is seen, and the run goes on."""
    run, seconds = f"{where.url}/{{}}".format, 4.0
    program = ft.partial(programs.at, where.names, dying_jobs.save_and_die)
    calls = [
        (2, 4, program, run(point), who, point, seconds, where.layout)
        for point in POINTS
    ]
    for point, ends in zip(POINTS, where.zygote.call(jobs.at_once, calls), strict=True):
        saved = dying_jobs.check_ends(ends, who, point, seconds)
        ended = where.run(2, 4, programs.resume, run(point), where.layout)
        assert ended == [([1, 2] if saved else [1], [1, 2, 3])] * 2, point


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_another_store_under_the_same_url(
    s3: Place, zygote: Zygote, layout: str
) -> None:
    """Each process would write to the store of its own machine."""
    path = f"{s3.url}/new"
    args = (programs.environment(s3), programs.save_to_another_store, path, layout)
    for kind, text in zygote.call(jobs.values, 2, 4, programs.at, *args):
        assert kind == "CheckpointError"
        assert f"Process 1 does not see {path}/@" in text
        assert "or one store" in text
    assert not locate(s3.url).list_keys()


def test_a_recording_in_another_store_under_the_same_url(
    s3: Place, zygote: Zygote
) -> None:
    """Which holds the same recording, as far as it was recorded before."""
    path = f"{s3.url}/new"
    eqx_ckpt.recording.Recording(path, programs.SAMPLE).close()
    here = bucket_at(path)
    there = here.at(programs.OTHER + here.spec["path"])
    for key in here.list_keys():
        there.write(key, here.read(key) or b"")
    args = (programs.environment(s3), programs.record_in_another_store, path)
    for kind, text in zygote.call(jobs.values, 2, 4, programs.at, *args):
        assert kind == "CheckpointError"
        assert f"does not see '{path}' as process 0 has opened it" in text


def test_all_survive_a_store_that_refuses(s3: Place, zygote: Zygote) -> None:
    where = Where(s3.url, "zarr", programs.environment(s3), zygote)
    # To one process alone: of it the other one hears.
    s3.proxy.add(proxy.answered(412), "PUT", r"/000002/.*/w/c\.0\.0")
    expected = ["NoneType", "ConnectionError", "NoneType", "1", "3"]
    assert where.run(2, 4, programs.survive, s3.url) == [expected] * 2
