"""Sources: rows of data sets, of checkpoints, and of Zarr arrays."""

import itertools
import pickle
import tracemalloc
import warnings
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

import eqx_ckpt
from eqx_ckpt import data
from eqx_ckpt.data._order import Rows
from eqx_ckpt.data._row_reader import RowReader


def rows(n: int = 10) -> list:
    return [{"x": [i, i + 0.5], "y": i, "text": f"row {i}"} for i in range(n)]


class Flaky:
    """A data set whose row 3 can be broken."""

    def __init__(self) -> None:
        self.rows, self.broken = rows(), False

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        if i == 3 and self.broken:
            raise OSError("the disk is gone")
        return {"y": self.rows[i]["y"]}


def epoch(loader, key) -> list:
    n = loader.batches_per_epoch
    batches = itertools.islice(loader.iterate(loader.start(1), info=True), n)
    return np.concatenate([b[key][i.mask] for _, b, i in batches]).tolist()


def test_random_access():
    source = data.RandomAccessDataSource(rows(), exclude=["text"])
    loader = data.Loader(source, 3, order="epochs")
    assert sorted(epoch(loader, "y")) == list(range(10))
    _, batch = jax.jit(loader.next)(loader.start())
    assert np.array_equal(batch["x"][:, 1], batch["y"] + 0.5)


def test_text_is_refused():
    with pytest.raises(TypeError, match=r"'text'.*exclude=\['text'\]"):
        data.RandomAccessDataSource(rows())


class Pair(NamedTuple):
    x: object
    y: object


class Sample(eqx.Module):
    x: object
    y: object


@pytest.mark.parametrize(
    "row",
    [
        lambda i: {"x": {"a": [i, i], "b": i}, "y": (i, [i, i])},
        lambda i: (i, ([i, i, i], {"z": i})),
        lambda i: Pair(i, [i, i]),
        lambda i: Sample(i, {"z": [i, i]}),
        lambda i: [i, i + 1],
        lambda i: i,
    ],
    ids=["nested", "tuples", "namedtuple", "module", "list", "number"],
)
def test_a_batch_has_the_structure_of_a_row(row):
    source = data.RandomAccessDataSource([row(i) for i in range(4)])
    loader = data.Loader(source, 4, order="sequential", cache=2)
    _, drawn = loader.next(loader.start())
    _, iterated = next(loader.iterate(loader.start()))
    for batch in (drawn, iterated):
        for i in range(4):
            found = jax.tree.map(lambda x, i=i: x[i].tolist(), batch)
            assert str(found) == str(row(i))


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"x": {"a": 1, "b": "t"}}, r"^'x/b' is .*exclude=\['x'\]"),
        ((1, (2, "t")), r"^'1/1' is .*leave it out of the rows"),
        (Sample(1, {"z": None}), r"^'y/z' is "),
        ({"x": [np.ones(2), 1]}, r"^'x' is .*exclude=\['x'\].*a tuple"),
        ([np.ones(2), 1], r"^The row is .*A list becomes one array"),
        ("t", r"^The row is "),
        ((jax.random.key(0), 1), r"^'0' is "),
    ],
)
def test_what_is_no_number_is_named_by_its_path(row, error):
    with pytest.raises(TypeError, match=error):
        data.RandomAccessDataSource([row] * 5)


def test_arrays_in_a_dictionary_are_refused():
    with pytest.raises(TypeError, match="ArrayDataSource"):
        data.RandomAccessDataSource({"x": np.ones(5)})


class OnlySized:
    def __len__(self):
        return 5


class OnlyIndexed:
    def __getitem__(self, i):
        return {"x": i}


@pytest.mark.parametrize("stream", [iter(rows()), OnlySized(), OnlyIndexed()])
def test_streams_are_refused(stream):
    with pytest.raises(TypeError, match="stream"):
        data.RandomAccessDataSource(stream)


def test_keys_of_rows_that_have_none():
    with pytest.raises(ValueError, match=r"`exclude` is for .* of type tuple"):
        data.RandomAccessDataSource([(1, 2)], exclude=["x"])
    with pytest.raises(ValueError, match=r"`exclude` has 'z', .* 'x', 'y'"):
        data.RandomAccessDataSource([{"x": 1, "y": 2}], exclude=["x", "z"])


def test_tuples_and_many_at_once():
    class Torch(list):
        asked = 0

        def __getitems__(self, indices):
            type(self).asked += 1
            return [self[i] for i in indices]

    source = data.RandomAccessDataSource(Torch((np.ones(2) * i, i) for i in range(6)))
    loader = data.Loader(source, 6, order="sequential")
    _, (_, y) = loader.next(loader.start())
    assert y.tolist() == list(range(6))
    assert Torch.asked == 1


def test_a_row_that_cannot_be_read_is_named():
    class AtOnce(Flaky):
        def __getitems__(self, numbers):
            return [self[i] for i in numbers]

    dataset, many = Flaky(), AtOnce()
    loader = data.Loader(data.RandomAccessDataSource(dataset), 5, order="sequential")
    at_once = data.Loader(data.RandomAccessDataSource(many), 5, order="sequential")
    many.broken = True
    with pytest.raises(RuntimeError, match=r"One of the rows \[0, 1, 2, 3, 4\] .*gone"):
        next(at_once.iterate(at_once.start()))
    dataset.broken = True
    by_jax = jax.errors.JaxRuntimeError, ValueError
    with pytest.raises(by_jax, match="Row 3 .*the disk is gone"):
        jax.block_until_ready(loader.next(loader.start()))
    with pytest.raises(RuntimeError, match="Row 3 "):
        next(loader.iterate(loader.start()))
    dataset.broken = False
    assert loader.next(loader.start())[1]["y"].tolist() == [0, 1, 2, 3, 4]
    dataset.broken = True
    with pytest.raises(by_jax, match="Row 3 .*the disk is gone"):
        jax.block_until_ready(loader.next(loader.start()))
    dataset.broken = False
    dataset.rows.append(rows()[0])
    with pytest.raises(RuntimeError, match="11 rows now"):
        next(loader.iterate(loader.start()))


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_batch_of_columns_does_not_copy_the_whole_table(tmp_path, is_mapped):
    table = np.arange(2_500_000, dtype=np.float32).reshape(-1, 5)
    np.save(tmp_path / "table.npy", table)
    if is_mapped:
        table = np.load(tmp_path / "table.npy", mmap_mode="r")
    source = data.ArrayDataSource(x=table[:, :-1], y=table[:, -1])
    loader = data.Loader(source, 10, order="shuffle")
    batches = loader.iterate(loader.start(), prefetch=0)
    cursor, _ = next(batches)
    _, drawn = loader.next(cursor)
    jax.block_until_ready(drawn)
    tracemalloc.start()
    try:
        _, batch = next(batches)
        _, drawn = loader.next(cursor)
        jax.block_until_ready(drawn)
        assert tracemalloc.get_traced_memory()[1] < table.nbytes / 4
    finally:
        tracemalloc.stop()
    for found in (batch, drawn):
        expected = np.asarray(found["y"])[:, None] + np.arange(-4, 0)
        assert np.array_equal(found["x"], expected)


class Short(list):
    """Gives fewer rows, or more, than it was asked for."""

    change = 0

    def __getitems__(self, indices):
        return [self[0]] * (len(indices) + self.change)


class Ending(list):
    def __getitem__(self, i):
        if i == 2:
            raise StopIteration
        return super().__getitem__(i)


class OneRow(RowReader):
    rows, like = Rows(4), {"y": jax.ShapeDtypeStruct((), np.int64)}

    def take(self, indices):
        return {"y": np.zeros(1, np.int64)}


@pytest.mark.parametrize("cache", [1, 2])
@pytest.mark.parametrize("change", [-3, -1, 1])
def test_a_short_read_is_an_error(cache, change):
    dataset = Short({"y": i} for i in range(4))
    dataset.change = change
    one = data.ArrayDataSource(y=np.arange(4))
    one._reader = OneRow()
    sources = [
        (data.RandomAccessDataSource(dataset), r"gave \d+ rows, and was asked for \d+"),
        (data.RandomAccessDataSource(Ending({"y": i} for i in range(4))), "Row 2 "),
        (one, r"'y' of \d+ rows is int64\[1\]"),
    ]
    for source, error in sources:
        loader = data.Loader(source, 4, order="sequential", cache=cache)
        with pytest.raises(Exception, match=error):
            jax.block_until_ready(loader.next(loader.start()))
        with pytest.raises(RuntimeError, match=error):
            next(loader.iterate(loader.start()))


def test_rows_of_other_shapes_are_named():
    source = data.RandomAccessDataSource([{"x": np.ones(n)} for n in (2, 2, 3)])
    loader = data.Loader(source, 3)
    with pytest.raises(RuntimeError, match=r"Row 2 .*'x' is .*\[3\]"):
        next(loader.iterate(loader.start()))


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_rows_of_a_checkpoint(tmp_path, layout):
    tree = {
        "other": jnp.ones(3),
        "data": {"x": [jnp.ones((50, 4))], "y": np.arange(50)},
    }
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree, layout=layout)
    source = data.StoredDataSource(tmp_path / "c", prefix="data")
    loader = data.Loader(source, 8, order="epochs")
    assert sorted(found := epoch(loader, "y")) == list(range(50))
    assert loader.zeros()["x"][0].shape == (8, 4)
    assert epoch(pickle.loads(pickle.dumps(loader)), "y") == found
    with pytest.raises(ValueError, match="prefix"):
        data.StoredDataSource(tmp_path / "c")
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        data.StoredDataSource(tmp_path / "d")


def test_arrays_of_a_checkpoint_that_are_not_numbers(tmp_path):
    """It is the same error as that of arrays in memory."""
    tree = {"data": {"x": np.arange(5)}, "k": jax.random.split(jax.random.key(0), 5)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    with pytest.raises(TypeError) as stored:
        data.StoredDataSource(tmp_path / "c")
    with pytest.raises(TypeError) as in_memory:
        data.ArrayDataSource(k=tree["k"])
    same = str(in_memory.value).removesuffix("leave it out.")
    assert str(stored.value) == f"{same}pass a `prefix` without it."
    loader = data.Loader(data.StoredDataSource(tmp_path / "c", prefix="data"), 5)
    assert loader.zeros()["x"].shape == (5,)


def test_damage_is_found(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"x": jnp.arange(50.0)})
    source = data.StoredDataSource(tmp_path / "c")
    (chunk,) = (tmp_path / "c/x").glob("c*")
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    loader = data.Loader(source, 8)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="x"):
        next(loader.iterate(loader.start()))


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_arrays(tmp_path, version):
    array = zarr.create_array(
        tmp_path / "x", shape=(100, 3), chunks=(16, 3), dtype="i4", zarr_format=version
    )
    array[:] = np.arange(300).reshape(100, 3)
    source = data.StoredDataSource(x=tmp_path / "x", window=2)
    loader = data.Loader(source, 10, order="epochs", cache=2)
    found = np.asarray(epoch(loader, "x"))
    assert sorted(found[:, 0].tolist()) == list(range(0, 300, 3))
    assert not np.array_equal(found[:, 0], np.sort(found[:, 0]))


def test_zarr_arrays_of_what_no_batch_has(tmp_path):
    with warnings.catch_warnings(action="ignore"):  # Raw bytes are no part of Zarr v3.
        zarr.create_array(tmp_path / "x", shape=(9,), dtype="V5", zarr_format=2)
    with pytest.raises(TypeError, match="^'x' is of dtype .* only have numbers"):
        data.StoredDataSource(x=tmp_path / "x")


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_arrays_that_tensorstore_does_not_read(tmp_path, version):
    with warnings.catch_warnings(action="ignore"):  # Dates are no part of Zarr v3.
        array = zarr.create_array(
            tmp_path / "x", shape=(9,), dtype="datetime64[s]", zarr_format=version
        )
    assert array.shape == (9,)
    with pytest.raises(eqx_ckpt.CheckpointError, match="write it anew with") as caught:
        data.StoredDataSource(x=tmp_path / "x")
    assert not isinstance(caught.value, eqx_ckpt.CorruptCheckpointError)


def test_an_array_that_fits_into_no_cache_is_read_once(tmp_path, monkeypatch):
    # 200 MB on disk in 100 chunks, of which 8 are in memory at a time.
    n, width = 100_000, 500
    array = zarr.create_array(
        tmp_path / "x",
        shape=(n, width),
        chunks=(1000, width),
        dtype="f4",
        compressors=None,
    )
    array[:, 0] = np.arange(n)
    source = data.StoredDataSource(x=tmp_path / "x", window=4)
    read: list[int] = []
    reader = type(source._reader._stored)
    whole = reader.read

    def counted(self, start, stop):
        read.append(start)
        return whole(self, start, stop)

    monkeypatch.setattr(reader, "read", counted)
    loader = data.Loader(source, 1000, order="epochs")
    found = [
        batch["x"][:, 0]
        for _, batch in itertools.islice(
            loader.iterate(loader.start(), prefetch=0), 100
        )
    ]
    assert np.array_equal(np.sort(np.concatenate(found)), np.arange(n))
    assert len(read) == 100
    assert len(source._reader._kept) <= 8


@pytest.mark.peers
def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets")
    table = {"x": [[float(i)] * 3 for i in range(20)], "y": list(range(20))}
    source = data.RandomAccessDataSource(datasets.Dataset.from_dict(table))
    loader = data.Loader(source, 4, order="epochs")
    assert sorted(epoch(loader, "y")) == list(range(20))


def test_sharded_batches_on_a_mesh():
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("d",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    size = 4 * len(devices)
    source = data.ArrayDataSource(i=np.arange(10 * size), x=np.ones((10 * size, 2)))
    loader = data.Loader(source, size)
    plain = itertools.islice(loader.iterate(loader.start()), 5)
    placed = itertools.islice(loader.iterate(loader.start(), sharding=place), 5)
    for (one, host), (other, batch) in zip(plain, placed, strict=True):
        assert batch["i"].sharding == place
        assert np.array_equal(batch["i"], host["i"])
        assert int(one.position) == int(other.position)
