"""Arrays in a database, or compressed: a restore says and shows nothing of it."""

import itertools
import logging
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from faults import databases, workloads
from faults.workloads import every_kind, small_chunks
from helpers import assert_same, files_below
from support import (
    Directory,
    inspect_checkpoint,
    layout_hint,
    ocdbt_tree,
    worker_threads,
)

from .test_leaves import every_pattern, JAX_DTYPES, WIDE_DTYPES


save = eqx_ckpt.tree_serialise_leaves
restore = eqx_ckpt.tree_deserialise_leaves

LAYOUTS = ["zarr", "ocdbt"]


def by_name(name, record):
    assert record.is_array
    return "zstd" if "w" in name else None


COMPRESSIONS = {"none": None, "zstd": "zstd", "by name": by_name}
WAYS = [*itertools.product(LAYOUTS, COMPRESSIONS)]


def every_leaf():
    """Every kind of leaf, and every dtype."""
    dtypes = {name: every_pattern(jnp.dtype(name)) for name in JAX_DTYPES}
    wide = {name: every_pattern(np.dtype(name)) for name in WIDE_DTYPES}
    return {
        "kinds": every_kind(1),
        "jax": {name: jnp.asarray(array) for name, array in dtypes.items()},
        "numpy": dtypes | wide,
        "empty": {"jax": jnp.zeros((3, 0)), "numpy": np.zeros((0, 2**40), np.int8)},
        "scalars": [np.float32(1.5), np.array(2), True, 10**40, -0.0, float("nan")],
    }


@pytest.mark.parametrize(("layout", "compression"), WAYS)
def test_every_kind_of_leaf(layout, compression, tmp_path):
    tree = every_leaf()
    compression = COMPRESSIONS[compression]
    with small_chunks(200):
        save(tmp_path / "new", tree, layout=layout, compression=compression)
    assert eqx_ckpt.inspect.read_manifest(tmp_path / "new").layout == layout
    eqx_ckpt.inspect.verify(tmp_path / "new")
    assert_same(restore(tmp_path / "new", tree), tree)
    like = eqx_ckpt.tree_like(tmp_path / "new", prefix="kinds")
    assert_same(restore(tmp_path / "new", like, prefix="kinds"), tree["kinds"])


ARRAYS = hnp.arrays(
    st.sampled_from(["bool", "int8", "uint16", "float32", "complex64", "float64"]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7),
)


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), ARRAYS, max_size=4),
    st.sampled_from(WAYS),
    st.integers(1, 300),
)
@settings(max_examples=60)
def test_any_tree(tmp_path_factory, tree, way, size):
    path = tmp_path_factory.mktemp("any") / "new"
    layout, compression = way
    with small_chunks(size):
        save(path, tree, layout=layout, compression=COMPRESSIONS[compression])
    assert_same(restore(path, tree), tree)


def test_what_a_rule_says_is_in_the_manifest(tmp_path):
    tree = {"w": jnp.ones(9), "b": np.ones(9), "none": 3}
    save(tmp_path / "new", tree, compression=by_name)
    leaves = eqx_ckpt.inspect.read_manifest(tmp_path / "new").leaves
    assert leaves["w"].compression == "zstd"
    assert leaves["b"].compression is None


@pytest.mark.parametrize("bad", ["gzip", 3, True, ["zstd"], {}])
def test_what_is_no_compression(bad, zygote, disk):
    args = (str(disk / "new"), "zarr", bad)
    error = zygote.run(databases.save_compressed, *args).error
    assert isinstance(error, TypeError | ValueError)
    for text in ("`compression`", repr(bad), "'zstd'"):
        assert text in str(error)
    assert not list(disk.iterdir())


@pytest.mark.parametrize("bad", ["n5", None, "", "OCDBT", ["zarr"]])
def test_what_is_no_layout(bad, zygote, disk):
    error = zygote.run(workloads.save, str(disk / "new"), 1, False, bad).error
    assert isinstance(error, TypeError | ValueError)
    assert "'zarr', 'ocdbt'" in str(error)
    assert not list(disk.iterdir())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compressed_chunks_are_smaller(layout, tmp_path):
    tree = {"w": np.arange(2**18, dtype=np.int32) // 100}
    sizes = []
    for name, compression in COMPRESSIONS.items():
        save(tmp_path / name, tree, layout=layout, compression=compression)
        files = files_below(tmp_path / name)
        sizes.append(sum((tmp_path / name / file).stat().st_size for file in files))
    assert sizes[0] > 2**20
    assert sizes[1] == pytest.approx(sizes[2], abs=100)
    assert sizes[1] < sizes[0] / 10


def test_zarr_reads_what_is_compressed(tmp_path):
    tree = {"a": {"w": np.arange(600.0).reshape(20, 30)}, "b": np.arange(5)}
    with small_chunks(1000):
        save(tmp_path / "new", tree, compression="zstd")
    group = zarr.open_group(tmp_path / "new", mode="r")
    np.testing.assert_array_equal(group["a/w"][...], tree["a"]["w"])
    np.testing.assert_array_equal(group["b"][...], tree["b"])


def test_a_database_is_a_few_files(tmp_path):
    tree = {f"leaf{i}": np.full(100, i) for i in range(200)}
    save(tmp_path / "new", tree, layout="ocdbt")
    assert len(files_below(tmp_path / "new")) == 3


def on(*spec, **axes):
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
    return NamedSharding(mesh, P(*spec))


@pytest.mark.parametrize(("layout", "compression"), WAYS[:2] + WAYS[3:5])
def test_shardings(layout, compression, tmp_path):
    weight = np.arange(32 * 24, dtype=np.float32).reshape(32, 24)
    saved = {
        "w": jax.device_put(weight, on("x", "y", x=4, y=2)),
        "rows": jax.device_put(weight, on("x", x=8)),
        "all": jax.device_put(weight, on(x=8)),
    }
    compression = COMPRESSIONS[compression]
    with small_chunks(300):
        save(tmp_path / "new", saved, layout=layout, compression=compression)
    others = [
        on("y", "x", x=4, y=2),
        on(None, "x", x=8),
        on(("x", "y"), x=2, y=4),
        on(x=8),
        jax.sharding.SingleDeviceSharding(jax.devices()[5]),
    ]
    for sharding in others:
        restored = restore(tmp_path / "new", saved, sharding=sharding)
        for leaf in restored.values():
            assert leaf.sharding.is_equivalent_to(sharding, 2)
            np.testing.assert_array_equal(leaf, weight)
    restored = restore(
        tmp_path / "new", saved, sharding=others[0], broadcast_replicas=True
    )
    np.testing.assert_array_equal(restored["rows"], weight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_little_room_for_copies(layout, tmp_path):
    tree = {f"leaf{i}": np.full(2**18, i, np.int32) for i in range(150)}
    future = eqx_ckpt.tree_serialise_leaves_async(
        tmp_path / "new", tree, layout=layout, staging_bytes=1
    )
    future.result(timeout=300.0)
    assert_same(restore(tmp_path / "new", tree), tree)


def test_pieces_that_are_larger_than_a_batch(zygote, disk):
    """Whoever encodes them must not wait for the next one, which has no room yet."""
    path = str(disk / "new")
    outcome = zygote.run(databases.save_large_pieces, path, timeout=30)
    assert outcome.error is None
    assert not outcome.signal


@pytest.mark.parametrize(("layout", "compression"), WAYS)
def test_progress_sums_up(layout, compression, tmp_path):
    tree = {"w": jnp.ones((50, 30)), "b": np.ones(7), "none": np.zeros((0,)), "n": 1}
    total = 6000 + 56
    reports = []
    with small_chunks(500):
        save(
            tmp_path / "new",
            tree,
            layout=layout,
            compression=COMPRESSIONS[compression],
            progress=lambda *report: reports.append(report),
        )
    assert reports[-1] == ("commit", reports[-1][1], total, total)
    reports.clear()
    restore(tmp_path / "new", tree, progress=lambda *report: reports.append(report))
    done = [done for _, _, done, _ in reports]
    assert done == sorted(done)
    assert done[-1] == total


@pytest.mark.parametrize(
    ("before", "after"), [("zarr", "ocdbt"), ("ocdbt", "zarr"), ("ocdbt", "ocdbt")]
)
def test_overwriting(before, after, tmp_path):
    """A process that has read a database knows nothing of it once it is replaced."""
    path = tmp_path / "new"
    for seed, layout in enumerate((before, after, before, after)):
        tree = {"w": np.full(1000, seed), "n": seed}
        save(path, tree, layout=layout, overwrite=True)
        for _ in range(2):
            assert_same(restore(path, {"w": np.zeros(1000, int), "n": 0}), tree)
        eqx_ckpt.inspect.verify(path)
        assert (path / "manifest.ocdbt").exists() == (layout == "ocdbt")
        assert (path / "w").exists() == (layout == "zarr")


_PEAK = """
import sys
import numpy as np
import eqx_ckpt, tensorstore

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[name].split()[0]) >> 10

eqx_ckpt.tree_serialise_leaves(sys.argv[1] + "/warm", np.ones(9), layout="ocdbt")
tree = [np.full(2**22, i, np.float32) for i in range(25)]
before = status("VmRSS")
eqx_ckpt.tree_serialise_leaves(sys.argv[1] + "/new", tree, layout="ocdbt")
print(status("VmHWM") - before)
"""


@pytest.mark.once
def test_memory_of_a_save(disk: pathlib.Path):
    """A few batches of a tree of 400 MiB."""
    command = [sys.executable, "-c", _PEAK, str(disk)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(out) < 150


def test_a_node_of_a_database_is_read_once(tmp_path, monkeypatch):
    """It holds all keys, so that each leaf would cost as much as all of them."""
    monkeypatch.setattr(inspect_checkpoint, "_WINDOW", 1)
    parsed = []
    values_of = ocdbt_tree.values_of
    monkeypatch.setattr(
        ocdbt_tree, "values_of", lambda *args: parsed.append(1) or values_of(*args)
    )
    tree = {f"n{i}": np.full(40, i) for i in range(100)}
    save(tmp_path / "new", tree, layout="ocdbt")
    found = {
        name: array for name, _, array in eqx_ckpt.inspect.iter_leaves(tmp_path / "new")
    }
    assert_same(found, tree)
    assert len(parsed) == 1


def test_few_files_of_a_database_are_open(tmp_path, monkeypatch):
    """A large database has more than a process may open."""
    databases.set_options(monkeypatch, Directory, max_transaction=2000)
    path, tree = tmp_path / "new", {f"n{i}": np.full(200, i) for i in range(100)}
    save(path, tree, layout="ocdbt")
    assert len([*(path / "d").iterdir()]) > 50
    monkeypatch.setattr(worker_threads, "SMALL", 0)  # Threads read them.
    preadv, counts = os.preadv, []

    def counted(*args):
        time.sleep(0.001)  # Most values are pending meanwhile.
        counts.append(sum(map(is_ours, os.listdir("/proc/self/fd"))))
        return preadv(*args)

    def is_ours(fd: str) -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{fd}").startswith(str(path))
        except FileNotFoundError:  # Another thread has closed it.
            return False

    monkeypatch.setattr(os, "preadv", counted)
    assert_same(restore(path, tree), tree)
    assert len(counts) == 100
    assert 1 < max(counts) < 30


def test_a_value_in_a_foreign_file_is_refused(tmp_path, monkeypatch):
    """TensorStore would follow a location to wherever it leads."""
    write = {"value_data_prefix": "elsewhere/"}
    databases.set_options(monkeypatch, Directory, write=write)
    path, tree = tmp_path / "new", {"w": np.arange(1000.0)}
    save(path, tree, layout="ocdbt")
    with pytest.raises(
        eqx_ckpt.CorruptCheckpointError, match="'w': .* is not a place in this database"
    ):
        restore(path, tree)


def test_a_database_with_several_levels(tmp_path, monkeypatch):
    """Its tree has more than one node if there are 100,000 names, or small nodes."""
    write = {"config": {"max_decoded_node_bytes": 400}}
    databases.set_options(monkeypatch, Directory, write=write)
    path, tree = tmp_path / "new", {f"n{i}": np.full(i % 40, i) for i in range(200)}
    save(path, tree, layout="ocdbt")
    assert_same(restore(path, tree), tree)
    for name in [*tree][::20]:
        assert_same(restore(path, tree[name], prefix=name), tree[name])

    base = ts.KvStore.open(f"file://{path}/").result()
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]["location"]
    children = ts.ocdbt.dump(base, root).result()["entries"]
    *_, name, start, nbytes = children[1]["location"].split(":")
    file = path / name
    data = bytearray(file.read_bytes())
    data[int(start) + int(nbytes) // 2] ^= 1
    file.write_bytes(data)
    first = children[1]["key"].split(b"/")[0].decode()
    with pytest.raises(
        eqx_ckpt.CorruptCheckpointError, match=f"{first!r}: .*its checksum differs"
    ):
        restore(path, tree)
    assert_same(restore(path, tree["n0"], prefix="n0"), tree["n0"])


@pytest.mark.once
def test_a_tree_of_many_small_arrays_is_told_of_databases_once(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(layout_hint, "_was_given", False)
    caplog.set_level(logging.INFO, "eqx_ckpt")

    def hints(name, count, nbytes, **how):
        caplog.clear()
        tree = {str(i): np.zeros(nbytes, np.uint8) for i in range(count)}
        eqx_ckpt.tree_serialise_leaves(tmp_path / name, tree, **how)
        return ["'ocdbt'" in message for message in caplog.messages].count(True)

    assert hints("few", 999, 10) == 0
    assert hints("large", 1000, 2**16) == 0
    assert hints("database", 1000, 10, layout="ocdbt") == 0
    assert hints("many", 1000, 10) == 1
    assert hints("again", 1000, 10) == 0
