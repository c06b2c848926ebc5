"""Chunks are read into place: in pieces, from any region, over a disk that fails."""

import errno
import gc
import itertools
import os
import tracemalloc

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import eqx_ckpt
from faults.workloads import small_chunks
from helpers import assert_same, evict, folder_on_disk
from support import (
    chunk_bytes,
    chunk_grid as chunks,
    file_reads,
    locate,
    worker_threads,
)


NBYTES = 2**23


@pytest.fixture
def tmp_path():
    with folder_on_disk() as folder:
        yield folder


@pytest.fixture(params=itertools.product(["zarr", "ocdbt"], ["cached", "cold"]))
def saved(tmp_path, request):
    layout, state = request.param
    tree = {"large": np.arange(NBYTES // 4, dtype=np.float32), "small": np.arange(3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree, layout=layout)
    if state == "cold":
        evict(tmp_path)
    return tmp_path / "ckpt", tree


def in_preadv(monkeypatch, act):
    """Call `act(n, fd, buffers, offset)` instead of the n-th read of each restore."""
    preadv, count = os.preadv, itertools.count()

    def acting(fd, buffers, offset):
        found = act(next(count), fd, buffers, offset)
        return preadv(fd, buffers, offset) if found is None else found

    monkeypatch.setattr(os, "preadv", acting)
    return preadv


def test_a_disk_that_fails_in_the_middle_of_a_file(saved, monkeypatch):
    path, tree = saved

    def fail(n, fd, buffers, offset):
        if offset >= NBYTES // 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    in_preadv(monkeypatch, fail)
    with pytest.raises(OSError, match="'large'") as raised:
        eqx_ckpt.tree_deserialise_leaves(path, tree)
    assert raised.value.errno == errno.EIO


def test_a_file_that_is_cut_while_it_is_read(saved, monkeypatch):
    path, tree = saved

    def cut(n, fd, buffers, offset):
        if offset == NBYTES // 2:
            file = max(path.rglob("*"), key=lambda file: file.stat().st_size)
            os.truncate(file, offset + 100)

    in_preadv(monkeypatch, cut)
    with pytest.raises(
        eqx_ckpt.CorruptCheckpointError, match="'large': .* 4194404 bytes"
    ):
        eqx_ckpt.tree_deserialise_leaves(path, tree)


def test_reads_that_stop_early(saved, monkeypatch):
    path, tree = saved

    def read_less(n, fd, buffers, offset):
        if n % 3:
            half = len(buffers[0]) // 2
            return preadv(fd, [buffers[0][:half]] if half else buffers, offset)
        return None

    preadv = in_preadv(monkeypatch, read_less)
    assert_same(eqx_ckpt.tree_deserialise_leaves(path, tree), tree)


@pytest.mark.parametrize("is_cold", [False, True])
@pytest.mark.parametrize(
    ("limit", "piece"), [(2**6, 2**5), (2**10, 2**6), (2**23, 2**18)]
)
def test_any_region_of_any_chunk(tmp_path, limit, piece, is_cold, monkeypatch):
    """Runs of bytes, rows, columns, and what is at the edge of an array."""
    monkeypatch.setattr(file_reads, "_LARGE", 1)
    monkeypatch.setattr(chunk_bytes, "PIECE_BYTES", piece)
    rng = np.random.default_rng(0)
    shapes = [(16,), (8, 10), (4, 6, 7), (1, 12, 20), (4, 1, 4, 3), (8, 9, 2)]
    tree = {str(i): rng.standard_normal(s, np.float32) for i, s in enumerate(shapes)}
    with small_chunks(limit):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    for axes in [(4, 2), (1, 2)]:
        devices = np.array(jax.devices()[: axes[0] * axes[1]]).reshape(axes)
        mesh = Mesh(devices, ("x", "y"))
        for spec in [("x",), ("y",), (None, "y"), (None, None, "y"), ("x", "y")]:
            target = {
                name: NamedSharding(mesh, PartitionSpec(*spec[: array.ndim]))
                for name, array in tree.items()
            }
            fitting = {
                name: jax.ShapeDtypeStruct(tree[name].shape, np.float32, sharding=s)
                for name, s in target.items()
                if all(
                    size % parts == 0
                    for size, parts in zip(
                        tree[name].shape, _parts(s, tree[name].ndim), strict=True
                    )
                )
            }
            if is_cold:
                evict(tmp_path)
            restored = eqx_ckpt.tree_deserialise_leaves(
                tmp_path / "ckpt", fitting, where=lambda t: list(t.values())
            )
            for name, array in restored.items():
                np.testing.assert_array_equal(np.asarray(array), tree[name])


def _parts(sharding, ndim):
    sizes = sharding.mesh.shape
    spec = [*sharding.spec, *[None] * ndim][:ndim]
    return [1 if axis is None else sizes[axis] for axis in spec]


def test_runs():
    whole = chunks.whole
    assert chunks.run_start(whole((3, 4)), (3, 4)) == 0
    assert chunks.run_start((slice(1, 3), slice(0, 4)), (3, 4)) == 4
    assert chunks.run_start((slice(1, 2), slice(1, 3)), (3, 4)) == 5
    assert chunks.run_start((slice(0, 2), slice(1, 3)), (3, 4)) is None
    assert chunks.run_start((), ()) == 0


def test_every_chunk_has_its_size(tmp_path):
    mesh = jax.make_mesh((8,), ("x",))
    place = NamedSharding(mesh, PartitionSpec("x"))
    array = jax.device_put(np.arange(64, dtype=np.float32), place)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", {"w": array})
    chunks = sorted((tmp_path / "new/w").glob("c.*"))
    assert len(chunks) == 8
    for chunk in chunks:
        whole = chunk.read_bytes()
        for wrong in (whole[:-1], whole + b"\0", b""):
            chunk.write_bytes(wrong)
            with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'w'"):
                eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", {"w": array})
        chunk.write_bytes(whole)
    eqx_ckpt.inspect.verify(tmp_path / "new")


class SameInode:
    """What `os.stat` says, of an inode number that was used again."""

    def __init__(self, status):
        self._status = status
        self.st_ino = 1

    def __getattr__(self, name):
        return getattr(self._status, name)


def test_a_replacement_is_seen_where_inode_numbers_are_used_again(
    tmp_path, monkeypatch
):
    path, stat = tmp_path / "new", os.stat

    def save(value):
        tree = {"a": np.full(4, value), "b": np.full(4, value)}
        eqx_ckpt.tree_serialise_leaves(path, tree, overwrite=True)

    def spec(f, leaf):
        found = eqx_ckpt.default_deserialise_filter_spec(f, leaf)
        if f.name == "a" and found[0] == 1.0:
            save(2.0)
            save(3.0)
        return found

    def same_inode(at, *args, **kwargs):
        status = stat(at, *args, **kwargs)
        is_ours = str(at).rstrip("/") == str(path)
        return SameInode(status) if is_ours else status

    save(1.0)
    like = {"a": np.zeros(4), "b": np.zeros(4)}
    monkeypatch.setattr(os, "stat", same_inode)
    found = eqx_ckpt.tree_deserialise_leaves(path, like, spec)
    assert found["a"].tolist() == found["b"].tolist() == [3.0] * 4


def test_compressed_chunks_are_decoded_a_few_at_a_time(tmp_path, monkeypatch):
    """Otherwise all of a checkpoint would be in memory twice."""
    living, counts = set(), []

    class Content(bytes):
        def __del__(self):
            living.discard(id(self))

    def spied(data, nbytes):
        content = Content(decompressed(data, nbytes))
        living.add(id(content))
        counts.append(len(living))
        return content

    decompressed = chunk_bytes.decompressed
    monkeypatch.setattr(chunk_bytes, "decompressed", spied)
    monkeypatch.setattr(worker_threads, "SMALL", 0)
    tree = {str(i): np.full(250, i) for i in range(64)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree, compression="zstd")
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", tree), tree)
    assert len(counts) == 64
    assert max(counts) <= 9  # Eight threads, and the calling one.


def test_nothing_stays_of_a_restore_that_failed():
    """Who keeps the error, as a notebook does, does not keep the arrays."""
    url, tree = "memory://failed", {"large": np.ones(2**17), "lost": np.ones(3)}
    eqx_ckpt.tree_serialise_leaves(url, tree)
    place = locate(url)
    place.delete([key for key in place.list_keys() if key.endswith("/lost/c.0")])
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'lost'"):
            eqx_ckpt.tree_deserialise_leaves(url, tree)
        assert tracemalloc.get_traced_memory()[0] < 2**19
    finally:
        tracemalloc.stop()
        gc.enable()
