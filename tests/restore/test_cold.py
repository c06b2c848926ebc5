"""What is not in the page cache is read past it, and nothing else is evicted."""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ckpt
from helpers import assert_same, evict, folder_on_disk, until
from support import file_reads


pytestmark = pytest.mark.once


# Of no whole number of blocks, of several chunks, and of a few bytes.
RANDOM = np.random.default_rng(0)
TREE = {
    "odd": RANDOM.integers(0, 256, 3 * 2**20 + 5, np.uint8),
    "rows": RANDOM.standard_normal((1001, 1333), np.float32),
    "long": RANDOM.standard_normal((9 * 2**20 // 32, 8), np.float32),
    "small": np.arange(3, dtype=np.int32),
}

# A database has small values, and its tree, in the files of large ones.
FEW = 8


@pytest.fixture(scope="module", params=["zarr", "ocdbt", "zstd"])
def saved(request):
    how = request.param
    layout = {"compression": how} if how == "zstd" else {"layout": how}
    with folder_on_disk() as folder:
        eqx_ckpt.tree_serialise_leaves(folder / "ckpt", TREE, **layout)
        yield folder / "ckpt"


@pytest.fixture
def direct(saved, monkeypatch):
    """Bytes that are read past the page cache; none if the file system has no such."""
    found, preadv = [], os.preadv

    def counting(fd, buffers, offset):
        count = preadv(fd, buffers, offset)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            found.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    evict(saved)
    if cached_pages(saved) > FEW:
        pytest.skip("`/var/tmp` is in memory")
    eqx_ckpt.inspect.verify(saved)
    if not found:
        pytest.skip("the file system of `/var/tmp` has no reads past its cache")
    found.clear()
    return found


def cached_pages(directory):
    """How many pages of large files are in the page cache."""
    libc, count = ctypes.CDLL(None), 0
    for file in directory.rglob("*"):
        if not file.is_file() or file.stat().st_size < 2**20:
            continue
        with open(file, "rb") as f:
            pages = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=3)
            view = ctypes.c_char.from_buffer(pages)
            held = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
            size = ctypes.c_size_t(len(pages))
            assert libc.mincore(ctypes.byref(view), size, held) == 0
            count += sum(page & 1 for page in held)
            del view
            pages.close()
    return count


def sharded(name, struct):
    mesh = jax.make_mesh((8,), ("x",))
    spec = PartitionSpec("x") if name == "long" else PartitionSpec()
    return NamedSharding(mesh, spec)


def some_rows(tree):
    return {"rows": tree["rows"][3:700], "long": tree["long"][100_001:, 2:5]}


RESTORES = {
    "all": lambda path: (eqx_ckpt.tree_deserialise_leaves(path, TREE), TREE),
    "sharded": lambda path: (
        eqx_ckpt.tree_deserialise_leaves(
            path, jax.eval_shape(lambda: TREE), sharding=sharded
        ),
        TREE,
    ),
    "parts": lambda path: (
        eqx_ckpt.tree_deserialise_leaves(path, some_rows(TREE), transform=some_rows),
        some_rows(TREE),
    ),
}


def assert_equal(found, expected):
    for name in expected:
        np.testing.assert_array_equal(np.asarray(found[name]), expected[name])


@pytest.mark.parametrize("what", RESTORES)
def test_a_cold_restore(saved, direct, what):
    evict(saved)
    for found, expected in (RESTORES[what](saved), RESTORES[what](saved)):
        assert_equal(found, expected)
    assert direct
    assert cached_pages(saved) <= FEW


def test_what_is_cached_is_read_from_there(saved, direct):
    for file in saved.rglob("*"):
        if file.is_file():
            file.read_bytes()
    eqx_ckpt.tree_deserialise_leaves(saved, TREE)
    eqx_ckpt.inspect.verify(saved)
    assert sum(direct) < 2**22  # The system may need memory meanwhile.


def test_what_is_looked_at_as_a_whole_stays_outside(saved, direct, tmp_path):
    evict(saved)
    eqx_ckpt.inspect.verify(saved)
    eqx_ckpt.inspect.stats(saved)
    assert cached_pages(saved) <= FEW
    eqx_ckpt.copy(saved, tmp_path / "copy")
    assert cached_pages(saved) <= FEW
    assert direct


def test_rows_that_are_read_again_stay_in_the_cache(saved, direct):
    evict(saved)
    source = eqx_ckpt.data.StoredDataSource(saved, prefix="long")
    loader = eqx_ckpt.data.Loader(source, batch_size=1000)
    loader.next(loader.start(seed=0))
    assert cached_pages(saved)
    assert not direct


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOMEM])
def test_a_file_system_that_refuses(saved, direct, monkeypatch, number):
    counting = os.preadv

    def refusing(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return counting(fd, buffers, offset)

    evict(saved)
    monkeypatch.setattr(os, "preadv", refusing)
    assert_same(eqx_ckpt.tree_deserialise_leaves(saved, TREE), TREE)


@pytest.mark.parametrize("lacks", ["statx", "syscall"])
def test_a_system_that_cannot_tell(saved, direct, monkeypatch, lacks):
    class Lacking:
        def __getattr__(self, name):
            return (lambda *_: -1) if name == lacks else getattr(libc, name)

    libc = file_reads.LIBC
    monkeypatch.setattr(file_reads, "LIBC", Lacking())
    ctypes.set_errno(errno.ENOSYS)
    evict(saved)
    assert_same(eqx_ckpt.tree_deserialise_leaves(saved, TREE), TREE)
    assert not direct


def test_a_process_that_has_no_descriptors_left(saved, direct, monkeypatch):
    open_, refused = os.open, []

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            refused.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return open_(path, flags, *args, **kwargs)

    evict(saved)
    monkeypatch.setattr(os, "open", refusing)
    assert_same(eqx_ckpt.tree_deserialise_leaves(saved, TREE), TREE)
    assert refused


def descriptors(directory):
    """What this process has open in the directory."""
    found = []
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(entry.readlink())
    return [file for file in found if file.is_relative_to(directory)]


def test_no_descriptor_stays_open(saved, direct):
    evict(saved)
    eqx_ckpt.inspect.verify(saved)
    # TensorStore closes a file behind the answer of its read.
    until(lambda: not descriptors(saved))


WRITERS = {
    "safetensors": (eqx_ckpt.interop.to_safetensors, eqx_ckpt.interop.open_safetensors),
    "npz": (eqx_ckpt.interop.to_npz, eqx_ckpt.interop.open_npz),
}


@pytest.mark.filterwarnings("ignore:A safetensors file")
@pytest.mark.parametrize("saved", ["zarr"], indirect=True)
@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_of_another_library(saved, direct, kind):
    write, open_file = WRITERS[kind]
    file = saved.parent / f"tree.{kind}"
    write(saved, file)
    evict(file.parent)
    direct.clear()
    source = open_file(file)
    for find in RESTORES.values():
        assert_equal(*find(source))
    assert direct
    assert (
        cached_pages(file.parent) < 2**20 // mmap.PAGESIZE
    )  # Headers, and around them.
