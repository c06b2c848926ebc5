"""A directory of each process, in a job of one: what the part of a step is."""

import logging
import pathlib
import threading
import time
import warnings
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt
from faults.manifests import edited
from helpers import assert_same, until
from support import chunk_reads, CommonSteps, own_disks, plan_part, Run, Uploads


PATIENCE = 300.0  # seconds; longer than anything here takes


def write(f: Any, leaf: Any) -> None:
    if isinstance(leaf, str):
        f.write(leaf.encode())
    else:
        eqx_ckpt.default_serialise_filter_spec(f, leaf)


def read(f: Any, leaf: Any) -> Any:
    if isinstance(leaf, str):
        return f.read().decode()
    return eqx_ckpt.default_deserialise_filter_spec(f, leaf)


def tree(by: int = 0) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    data = jnp.arange(64.0).reshape(8, 8) + by
    return {
        "both": jax.device_put(data, NamedSharding(mesh, P("x", "y"))),
        "same": jax.device_put(data.astype(jnp.bfloat16), NamedSharding(mesh, P())),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(by), 4), NamedSharding(mesh, P("y"))
        ),
        "swapped": np.arange(3, dtype=">i4") + by,
        "flags": np.array([True, False]),
        "dates": np.array(["2020-01-01"], "M8[D]"),
        "empty": np.zeros((0, 3)),
        "0": {"at": np.float64(by), "text": f"a text {by}"},
        "numbers": (by, 0.5, True, 1j),
    }


def arrays(by: int = 0) -> dict[str, Any]:
    return {"both": tree(by)["both"], "swapped": tree(by)["swapped"], "number": by}


def manager(place: pathlib.Path, **how: Any) -> eqx_ckpt.CheckpointManager:
    mirror = eqx_ckpt.Mirror(place / "there")
    return eqx_ckpt.CheckpointManager(
        place / "here", mirror=mirror, shared=False, **how
    )


@pytest.mark.parametrize(("layout", "codec"), [("zarr", None), ("ocdbt", "zstd")])
def test_all_kinds_of_leaves(tmp_path, layout, codec):
    """From the disk, and from the mirror, which has what an ordinary save has."""
    saved = tree()
    how = {"layout": layout, "compression": codec}
    with manager(tmp_path, **how) as one:
        one.save(1, saved, write, metadata={"loss": float("nan")}).result()
        assert_same(one.restore(tree(1), filter_spec=read), saved)
        about = one.read_manifest(1)
        assert about.leaves["both"].shape == (8, 8)
        assert about.metadata == pytest.approx({"loss": float("nan")}, nan_ok=True)
        part = one.restore(tree(1)["both"], prefix="both")
        assert (part == saved["both"]).all()
    there = eqx_ckpt.CheckpointManager(tmp_path / "there")
    assert_same(there.restore(tree(1), filter_spec=read), saved)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "usual", saved, write, **how)
    found, usual = (
        eqx_ckpt.inspect.read_manifest(path)
        for path in (tmp_path / "there/000001", tmp_path / "usual")
    )
    assert found.leaves == usual.leaves
    assert found.unsaved == usual.unsaved
    assert eqx_ckpt.inspect.verify(tmp_path / "here/000001")


def test_a_part_is_not_taken_for_a_step(tmp_path):
    with manager(tmp_path) as one:
        one.save(1, arrays()).result()
    here = tmp_path / "here"
    part = eqx_ckpt.inspect.read_manifest(here / "000001").part
    assert part is not None
    assert (part.process, part.processes, len(part.id)) == (0, 1, 32)
    words = "is part 0 of 1 of a step"
    with pytest.raises(eqx_ckpt.CheckpointError, match=words):
        eqx_ckpt.CheckpointManager(here).restore(arrays())
    with pytest.raises(eqx_ckpt.CheckpointError, match=words):
        eqx_ckpt.tree_deserialise_leaves(here / "000001", arrays())
    with pytest.raises(eqx_ckpt.CheckpointError, match=words):
        eqx_ckpt.sync(here, tmp_path / "other")
    assert eqx_ckpt.sync(here, tmp_path / "there") == []
    eqx_ckpt.copy(here / "000001", tmp_path / "copy")
    with pytest.raises(eqx_ckpt.CheckpointError, match=words):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "copy", arrays())


def test_a_whole_step_is_not_replaced(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "here/000001", arrays())
    with manager(tmp_path, keep=eqx_ckpt.keep_last(1)) as one:
        assert one.latest() is None
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match="Step 1 exists"):
            one.save(1, arrays())
    assert_same(
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "here/000001", arrays(1)), arrays()
    )


@pytest.mark.parametrize("harm", ["", "newest", "older"])
def test_room_is_made_after_a_failure(tmp_path, harm):
    """Before the next save, what `keep` does not keep goes, if the rest is whole."""
    run = tmp_path / "here"
    with eqx_ckpt.CheckpointManager(run, shared=False) as one:
        for step in (1, 2, 3):
            one.save(step, arrays(step))
    if harm:
        chunk = next((run / f"00000{3 if harm == 'newest' else 1}").glob("**/c*"))
        chunk.unlink()
    seen = []

    def progress(*_):
        seen.append(sorted(path.name for path in run.glob("00*")))
        if len(seen) == 1:
            raise OSError("the disk is full")

    keep = eqx_ckpt.keep_last(1)
    with eqx_ckpt.CheckpointManager(
        run, shared=False, keep=keep, on_error="warn", progress=progress
    ) as one:
        assert one.save(4, arrays(4)).exception() is not None
        one.save(5, arrays(5)).result()
    assert seen[0] == ["000001", "000002", "000003"]
    left = {
        "": ["000003"],
        "newest": ["000002", "000003"],
        "older": ["000001", "000003"],
    }
    assert seen[1] == left[harm]


def test_parts_of_another_save_than_that_in_a_mirror(tmp_path):
    """They are stale if a mirror has the step, and none has that of the parts."""
    with manager(tmp_path) as one:
        one.save(1, arrays(1)).result()
    with eqx_ckpt.CheckpointManager(tmp_path / "other") as other:
        other.save(1, arrays(2))
    common = CommonSteps(tmp_path / "here")
    common.agree(lambda topic, value, make: make([value]), common.stored.named)
    same, another, empty = (
        Run(tmp_path / name) for name in ("there", "other", "nothing")
    )
    assert common.why_stale(1, [same]) is None
    assert common.why_stale(1, [empty, another, same]) is None
    assert common.why_stale(1, []) == common.why_stale(1, [empty]) == ""
    text = common.why_stale(1, [empty, another])
    sessions = [of.sessions[0].id for run in (same, another) if (of := run.history(1))]
    assert text is not None
    assert len({*sessions}) == 2
    assert f"Step 1 of the disks was saved in session {sessions[0]}" in text
    assert f"Step 1 in '{another.directory}' was saved in session {sessions[1]}" in text
    assert "To go on from a step before both, pass `step`" in text
    # Of what cannot be read, nobody says that it is another save.
    (tmp_path / "here/000001/zarr.json").write_bytes(b"damaged")
    assert common.why_stale(1, [another]) == ""


def test_damage(tmp_path, caplog):
    """A part that is not what it says is read from the mirror, or is an error."""
    with manager(tmp_path) as one:
        one.save(1, arrays()).result()
        assert one.uploads()[1].result(PATIENCE) is None
        manifest = tmp_path / "here/000001/zarr.json"
        before = manifest.read_bytes()

        def no_shard(content: dict[str, Any]) -> None:
            record = content["leaves"].pop("shards/both/at0.4")
            record["path"][2] = ["key", "at0.x"]
            content["leaves"]["shards/both/at0.x"] = record

        for text in (edited(before, no_shard), before[:-9]):
            manifest.write_bytes(text)
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                found = one.restore(arrays(1), on_damage="fallback")
            assert_same(found, arrays())
            assert "Step 1" in caplog.text
        manifest.write_bytes(before)
        chunk = tmp_path / "here/000001/shards/both/at0.4/c.0.0"
        chunk.write_bytes(bytes(chunk.stat().st_size))
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'fallback'"):
            one.restore(arrays(1))
        assert_same(one.restore(arrays(1), on_damage="fallback"), arrays())
        assert eqx_ckpt.inspect.verify(tmp_path / "here/000001")
        one.delete(1)
        one.save(2, arrays()).result()
    with eqx_ckpt.CheckpointManager(tmp_path / "here", shared=False) as alone:
        chunk = tmp_path / "here/000002/shards/both/at0.4/c.0.0"
        chunk.write_bytes(bytes(chunk.stat().st_size))
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="and no mirror has"):
            alone.restore(arrays(1), on_damage="fallback")


@pytest.mark.parametrize("how", ["missing", "short", "empty", "changed"])
def test_damage_to_shards_that_make_a_region(tmp_path, how):
    """It is the same error, and the same fallback, whatever the shardings."""
    saved = {"both": tree()["both"], "same": tree()["same"]}
    mesh = saved["both"].sharding.mesh
    specs = [P("x", "y"), P(), P("y", "x"), P(None, ("x", "y")), P("x")]
    for number, spec in enumerate(specs):
        place = tmp_path / str(number)
        codec = (None, "zstd")[number % 2]
        both = jax.device_put(saved["both"], NamedSharding(mesh, spec))
        like = saved | {"both": both * 0}
        with manager(place, compression=codec) as one:
            one.save(1, saved).result()
            assert one.uploads()[1].result(PATIENCE) is None
            _spoil(place / "here/000001/shards/both/at4.0/c.0.0", how)
            words = "leaves are not what was saved:\n- 'both': shards/both/at4.0/c.0.0"
            with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=words):
                one.restore(like)
            assert_same(one.restore(like, on_damage="fallback"), saved | {"both": both})
        assert eqx_ckpt.inspect.verify(place / "here/000001")


def _spoil(chunk: pathlib.Path, how: str) -> None:
    data = bytearray(chunk.read_bytes())
    data[3] ^= 1
    chunk.unlink()
    if how != "missing":
        chunk.write_bytes({"short": data[:5], "empty": b""}.get(how, data))


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_each_chunk_is_read_once(tmp_path, codec):
    """Whatever regions its shard is a part of, and into their memory."""
    saved = {name: tree(by)["both"] for by, name in enumerate("abc")}
    mesh = saved["a"].sharding.mesh
    with manager(tmp_path, compression=codec) as one:
        one.save(1, saved).result()
        assert one.uploads()[1].result(PATIENCE) is None
        for spec in (P(), P("y", "x"), P(None, ("x", "y"))):
            like = jax.device_put(saved, NamedSharding(mesh, spec))
            read, place = list[str](), chunk_reads.place

            def spy(chunk: Any, *others: Any, read=read, place=place) -> None:
                if chunk.name != "step":  # What its part says of the step.
                    read.append(chunk.key)
                place(chunk, *others)

            with mock.patch.object(chunk_reads, "place", spy):
                assert_same(one.restore(like, max_host_bytes=2**20), like)
            keys = [f"at{i}.{j}" for i in (0, 4) for j in (0, 4)]
            chunks = [f"shards/{name}/{key}/c.0.0" for name in saved for key in keys]
            assert sorted(read) == sorted(chunks)


CRAFTED: dict[str, tuple[str, dict[str, Any]]] = {
    "overlap": ("at0.2", {}),
    "not in the grid": ("at1.4", {}),
    "outside": ("at0.8", {}),
    "twice": ("at00.0", {}),
    "dtype": ("at0.4", {"dtype": "int32"}),
    "axes": ("at0", {"shape": [16], "chunk_shape": [16]}),
    "other leaf": ("", {}),
}


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("what", [*CRAFTED, "lacking"])
def test_a_part_that_is_not_that_of_its_step(tmp_path, what, is_global):
    """Nothing is returned that no shard has, and nothing is cast."""
    places = {"both": 0} if is_global else {}

    def plan(step: Any, _: Any, layout: Any) -> Any:
        return plan_part(step, places, layout)

    saved = {"both": tree()["both"], "same": tree()["same"]}
    with mock.patch.object(own_disks, "plan_part", plan), manager(tmp_path) as one:
        one.save(1, saved).result()
        assert one.uploads()[1].result(PATIENCE) is None
    here = tmp_path / "here/000001"

    def edit(content: dict[str, Any]) -> None:
        record = content["leaves"].pop("shards/both/at0.4")
        if what == "lacking":
            return
        at, changes = CRAFTED[what]
        leaf = "both" if at else "none"
        record["path"] = [["key", key] for key in ("shards", leaf, at or "at0.4")]
        name = f"shards/{leaf}/{at or 'at0.4'}"
        content["leaves"][name] = record | changes

    manifest = here / "zarr.json"
    manifest.write_bytes(edited(manifest.read_bytes(), edit))
    with eqx_ckpt.CheckpointManager(tmp_path / "here", shared=False) as one:
        like = {"both": np.zeros((8, 8), np.float32), "same": saved["same"]}
        with pytest.raises(eqx_ckpt.CheckpointError) as e:
            one.restore(like)
        is_known = what != "lacking" or is_global
        assert isinstance(e.value, eqx_ckpt.CorruptCheckpointError) == is_known
    if is_known:
        with manager(tmp_path) as one:
            assert_same(one.restore(saved, on_damage="fallback"), saved)


def test_damage_in_a_mirror(tmp_path):
    """What is damaged on the disk, and in the first mirror, the second one has."""
    places = [tmp_path / name for name in ("here", "there", "elsewhere")]

    def opened() -> eqx_ckpt.CheckpointManager:
        mirrors = [eqx_ckpt.Mirror(place) for place in places[1:]]
        return eqx_ckpt.CheckpointManager(places[0], mirror=mirrors, shared=False)

    with opened() as one:
        for step in (1, 2):
            one.save(step, arrays(step)).result()
            assert one.uploads()[step].result(PATIENCE) is None
    for place, leaf in zip(places[:2], ("shards/both/at0.4", "both"), strict=True):
        for chunk in (place / "000002" / leaf).glob("c*"):
            chunk.write_bytes(bytes(chunk.stat().st_size))
    with opened() as one, warnings.catch_warnings(action="error"):
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'fallback'"):
            one.restore(arrays())
        assert_same(one.restore(arrays(), on_damage="fallback"), arrays(2))
    assert eqx_ckpt.inspect.verify(places[0] / "000002")


def test_an_upload_that_is_about_to_end_holds_up_no_other(tmp_path):
    rest, goes_on = Uploads._rest, threading.Event()

    def rest_late(self: Uploads) -> None:
        goes_on.wait(PATIENCE)
        rest(self)

    with mock.patch.object(Uploads, "_rest", rest_late), manager(tmp_path) as one:
        for step in (1, 2):
            one.save(step, arrays(step)).result()
            assert one.uploads()[step].result(20.0) is None
        goes_on.set()


def test_an_array_that_a_jit_donates(tmp_path):
    """The shards do not depend on the array once the save has returned."""
    array = arrays()["both"]
    expected = np.asarray(array)
    with manager(tmp_path) as one:
        one.save(1, {"w": array})
        jax.jit(lambda x: x + 1, donate_argnums=0)(array)
        found = one.restore({"w": arrays(1)["both"]})
    assert (np.asarray(found["w"]) == expected).all()
    assert eqx.is_array(found["w"])


def test_leaves_that_are_not_finite(tmp_path):
    """Numbers are in no shard, and leaves have their own names."""
    told = set()
    how = {"progress": lambda phase, leaf, *_: told.add(leaf)}
    bad = arrays() | {"number": float("nan"), "swapped": np.array([np.inf, 1, 2])}
    bad["both"] = bad["both"] * jnp.inf
    with manager(tmp_path, check_finite=True, **how) as one:
        one.save(1, arrays()).result()
        text = str(one.save(2, bad).exception())
        assert one.steps() == [1]
    assert "- 'both': float32[8, 8]: 1 NaN, 63 infinite." in text
    assert "- 'swapped': NumPy float64[3]: 0 NaN, 1 infinite." in text
    assert "- 'number': Python float = nan." in text
    assert told >= {"both", "swapped"}
    assert not any(name.startswith("shards") for name in told)


def test_leaves_that_are_not_frozen_have_their_own_names(tmp_path, caplog):
    with manager(tmp_path, incremental=True, frozen=True) as one:
        one.save(1, arrays(0)).result()
        one.save(2, arrays(1)).result()
    assert "were saved in" in caplog.text
    assert ": 'both', 'swapped'." in caplog.text


def test_keep_may_restore_when_room_is_made(tmp_path):
    """It looks at a step, from which the training does not go on."""
    fails = [False, True]

    def progress(phase, *_):
        if phase == "commit" and fails and fails.pop(0):
            raise OSError("the disk is full")

    def keep(steps):
        if 1 in steps:
            one.restore(arrays(), 1)
        with pytest.raises(eqx_ckpt.CheckpointError, match="may not save"):
            one.wait()
        return [*steps]

    how = {"keep": keep, "progress": progress, "on_error": "warn"}
    with eqx_ckpt.CheckpointManager(tmp_path, shared=False, **how) as one:
        one.save(1, arrays(1)).result()
        assert one.save(2, arrays(2)).exception() is not None
        for step in (3, 4):
            one.save(step, arrays(step)).result()
    histories = [one.read_manifest(step).history for step in (1, 3, 4)]
    assert {history and len(history.sessions) for history in histories} == {1}


def test_an_upload_whose_thread_dies_is_not_waited_for(tmp_path):
    def keep(steps):
        raise SystemExit("A function of `keep` ends the thread.")

    mirror = eqx_ckpt.Mirror(tmp_path / "there", keep=keep, timeout=20.0)
    one = eqx_ckpt.CheckpointManager(tmp_path / "here", mirror=mirror, shared=False)
    one.save(1, arrays()).result()
    until(lambda: one.upload_error is not None, PATIENCE)
    begin = time.monotonic()
    one.close()
    assert time.monotonic() - begin < 20
    assert one.mirrored() == [1]
