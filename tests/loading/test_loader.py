"""Loaders: equal cursors give equal batches, however they are drawn."""

import itertools
import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import data


ORDERS = ["sequential", "shuffle", "epochs", "independent"]


def digits(**kwargs) -> data.ArraySource:
    from sklearn.datasets import load_digits  # It takes seconds.

    images, labels = load_digits(return_X_y=True)
    return data.ArraySource(
        x=images.astype(np.float32), y=labels, i=np.arange(len(images)), **kwargs
    )


def small(count: int = 10, **kwargs) -> data.ArraySource:
    return data.ArraySource(i=np.arange(count), x=np.ones((count, 2)), **kwargs)


def drawn(loader, cursor, n) -> np.ndarray:
    """The rows of the next batches, by `next` in a scan."""

    @jax.jit
    def run(cursor):
        def step(cursor, _):
            cursor, batch = loader.next(cursor)
            return cursor, batch["i"]

        return jax.lax.scan(step, cursor, length=n)

    return np.asarray(run(cursor)[1])


@pytest.mark.parametrize(
    ("order", "batch_size", "cache"),
    [*((order, 3, 2) for order in ORDERS), ("epochs", 1, 7), ("epochs", 10, 7)],
)
def test_all_ways_give_the_same(order, batch_size, cache):
    n = 2 * -(-10 // batch_size) + 1
    reference = data.Loader(small(), batch_size, order=order)
    expected = drawn(reference, reference.start(5), n)
    cursor, rows = reference.block(reference.start(5), n)
    assert np.array_equal(rows["i"], expected)
    loader = data.Loader(small(), batch_size, order=order, cache=cache)
    assert np.array_equal(drawn(loader, loader.start(5), n), expected)
    on_device = data.Loader(small(on_device=True), batch_size, order=order)
    assert np.array_equal(drawn(on_device, on_device.start(5), n), expected)
    for prefetch in (0, 3):
        batches = reference.iterate(reference.start(5), prefetch=prefetch)
        some = list(itertools.islice(batches, n))
        assert np.array_equal([batch["i"] for _, batch in some], expected)
        assert int(some[-1][0].position) == int(cursor.position)
        assert int(some[-1][0].epoch) == int(cursor.epoch)


@pytest.mark.parametrize("order", ["shuffle", "epochs"])
def test_resume_at_every_position_of_two_epochs(order, tmp_path):
    loader = data.Loader(small(7), 3, order=order, cache=2)
    expected = drawn(loader, loader.start(1), 10)
    cursor = loader.start(1)
    for k, (after, _) in zip(
        range(6), loader.iterate(cursor, prefetch=4), strict=False
    ):
        saved = {"w": jnp.ones(2), "cursor": after}
        eqx_ckpt.tree_serialise_leaves(tmp_path / str(k), saved)
        for like in (
            {"w": jnp.zeros(2), "cursor": loader.start()},
            eqx.filter_eval_shape(lambda: {"w": jnp.ones(2), "cursor": loader.start()}),
        ):
            found = eqx_ckpt.tree_deserialise_leaves(tmp_path / str(k), like)
            cursor, batch = loader.next(found["cursor"])
            assert np.array_equal(batch["i"], expected[k + 1])
            _, batches = loader.block(cursor, 3)
            assert np.array_equal(batches["i"], expected[k + 2 : k + 5])


def test_three_integers_are_saved(tmp_path):
    loader = data.Loader(digits(), 100, cache=5)
    cursor, _ = loader.next(loader.start(3))
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"cursor": cursor})
    manifest = eqx_ckpt.read_manifest(tmp_path / "c")
    assert [*manifest.leaves] == ["cursor/seed", "cursor/epoch", "cursor/position"]


def test_another_loader_is_named(tmp_path):
    loader = data.Loader(small(), 2)
    cursor, _ = loader.next(loader.start(3))
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", cursor)
    other = data.Loader(small(), 5)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="batch_size=2 ") as error:
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "c", other.start())
    assert "`loader.start(accept_any=True)`" in str(error.value)
    assert "PRNG" not in str(error.value)
    assert not eqx_ckpt.match(tmp_path / "c", other.start()).ok
    like = other.start(accept_any=True)
    found = eqx_ckpt.tree_deserialise_leaves(tmp_path / "c", like)
    assert (int(found.seed), int(found.position)) == (3, 2)
    other.next(found)
    with pytest.raises(ValueError, match="batch_size=2"):
        other.next(cursor)


def test_a_replayed_cursor_gives_the_same_batch():
    loader = data.Loader(digits(), 64, cache=3)
    cursor, _ = loader.next(loader.start(0))
    first, again = loader.next(cursor)[1], loader.next(cursor)[1]
    assert np.array_equal(first["i"], again["i"])


def test_a_step_may_donate_its_cursor():
    loader = data.Loader(small(), 4)
    expected = drawn(loader, loader.start(), 6)
    step = eqx.filter_jit(lambda c: jax.tree.map(jnp.negative, c), donate="all")
    begun = loader.start()
    batches = loader.iterate(begun)
    found = [next(batches)[1]["i"]]
    step(begun)
    for cursor, batch in itertools.islice(batches, 5):
        found.append(batch["i"])
        step(cursor)
        assert cursor.position.is_deleted()
    assert np.array_equal(found, expected)


def test_an_iterator_may_end_in_its_own_thread():
    may_end, has_ended = threading.Event(), threading.Event()

    class Ending(data.ArraySource):
        calls = 0

        def take(self, indices):
            if self.calls and may_end.wait(60):
                batches.close()
                has_ended.set()
            self.calls += 1
            return super().take(indices)

    loader = data.Loader(Ending(i=np.arange(10)), 2)
    batches = loader.iterate(loader.start(), prefetch=2)
    next(batches)
    may_end.set()
    assert has_ended.wait(60)
    with pytest.raises(StopIteration):
        next(batches)


def test_the_last_batch_of_an_epoch_is_masked():
    loader = data.Loader(small(10), 4, order="epochs")
    cursor, seen = loader.start(0), []
    for _ in range(3):
        cursor, batch, info = loader.next(cursor, info=True)
        assert int(info.count) == int(info.mask.sum())
        assert (info.batch_size, info.total) == (4, 10)
        seen += np.asarray(batch["i"])[np.asarray(info.mask)].tolist()
    assert int(info.count) == 2
    assert sorted(seen) == list(range(10))
    assert (int(cursor.epoch), int(cursor.position)) == (1, 0)
    _, _, info = loader.block(loader.start(0), 3, info=True)
    assert info.count.tolist() == [4, 4, 2]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("cache", [1, 4, 100])
def test_map_counts_each_row_once(on_device, cache):
    loader = data.Loader(digits(on_device=on_device), 100, cache=cache)

    def count(seen, batch, mask):
        assert batch["x"].shape == (100, 64)
        return seen.at[batch["i"]].add(mask), mask.sum()

    seen, counts = jax.jit(lambda: loader.map(count, jnp.zeros(1797, int)))()
    assert np.array_equal(seen, np.ones(1797))
    assert counts.tolist() == 17 * [100] + [97]
    assert loader.map(count, jnp.zeros(1797, int))[1].tolist() == counts.tolist()


def test_inside_grad_and_vmap():
    loader = data.Loader(small(6), 2, cache=2)
    weights = jnp.arange(6.0)

    def loss(w, cursor):
        cursor, batch = loader.next(cursor)
        return jnp.sum(w[batch["i"]]), cursor

    gradient, cursor = jax.jit(jax.grad(loss, has_aux=True))(weights, loader.start(0))
    assert int(gradient.sum()) == 2
    whole = eqx.filter_grad(lambda both: loss(*both)[0])((weights, cursor))
    assert int(whole[0].sum()) == 2
    cursors = [loader.start(0), cursor, loader.start(9)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *cursors)
    found = jax.vmap(lambda c: loader.next(c)[1]["i"])(stacked)
    for rows, one in zip(found, cursors, strict=True):
        assert np.array_equal(rows, loader.next(one)[1]["i"])


def test_zeros_have_the_shapes_of_a_batch():
    loader = data.Loader(digits(), 100)
    zeros, (_, batch) = loader.zeros(), loader.next(loader.start())
    assert jax.tree.map(jnp.shape, zeros) == jax.tree.map(jnp.shape, batch)
    assert jax.tree.map(lambda x: x.dtype, zeros) == jax.tree.map(
        lambda x: x.dtype, batch
    )


@pytest.mark.parametrize("on_device", [False, True])
def test_rows_of_any_dtype(on_device):
    dtypes = ["bool", "int4", "uint4", "int8", "uint32", "float16", "complex64", ">f4"]
    dtypes += ["bfloat16", "float8_e4m3fn", "float4_e2m1fn"]
    rows = np.arange(40).reshape(10, 4) % 2 + np.arange(4) % 3
    arrays = {f"x{i}": rows.astype(dtype) for i, dtype in enumerate(dtypes)}
    arrays |= {"none": np.ones((10, 0), np.float32), "scalar": np.arange(10.0)}
    source = data.ArraySource(on_device=on_device, **arrays)
    loader = data.Loader(source, 5, order="sequential", cache=2)
    _, batch = loader.next(loader.start())
    for name, array in arrays.items():
        native = array.dtype.newbyteorder("=")
        expected = array[:5].astype(jax.dtypes.canonicalize_dtype(native))
        assert batch[name].dtype == expected.dtype
        assert np.array_equal(batch[name], expected)


def test_integers_that_do_not_fit_are_an_error():
    source = data.ArraySource(i=np.array([1, 2**40]))
    loader = data.Loader(source, 2, order="sequential")
    with pytest.raises(Exception, match="do not fit"):
        jax.block_until_ready(loader.next(loader.start()))
    (_, batch), *_ = itertools.islice(loader.iterate(loader.start()), 1)
    assert batch["i"].tolist() == [1, 2**40]
    with pytest.raises(OverflowError, match="do not fit"):
        data.ArraySource(on_device=True, i=np.array([1, 2**40]))


@pytest.mark.parametrize("on_device", [False, True])
def test_arrays_that_are_no_numbers_are_named(on_device):
    keys = jax.random.split(jax.random.key(0), 4)
    for bad in (["a", "b"], [{}], [[1], [2, 3]], keys):
        with pytest.raises(TypeError, match=r"^'x' .*or leave it out"):
            data.ArraySource(on_device=on_device, x=bad)
    loader = data.Loader(
        data.ArraySource(on_device=on_device, x=[1, 2, 3]), 3, order="sequential"
    )
    assert loader.next(loader.start())[1]["x"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": 11}, "10 rows"),
        ({"batch_size": 0}, "positive"),
        ({"batch_size": -1}, "positive"),
        ({"batch_size": True}, "positive"),
        ({"batch_size": 2, "cache": 0}, "cache"),
        ({"batch_size": 2, "order": "random"}, "'shuffle'"),
    ],
)
def test_bad_arguments(arguments, error):
    with pytest.raises(Exception, match=error):
        data.Loader(small(), **arguments)


def test_bad_uses():
    with pytest.raises(ValueError, match="first axis"):
        data.ArraySource(x=np.ones(3), y=np.ones(4))
    with pytest.raises(ValueError, match="no arrays"):
        data.ArraySource()
    with pytest.raises(TypeError, match="'t'"):
        data.ArraySource(t=np.array(["a", "b"]))
    with pytest.raises(Exception, match="Source"):
        data.Loader(np.ones(3), 1)
    loader = data.Loader(small(), 2)
    with pytest.raises(ValueError, match="seed"):
        loader.start(-1)
    for draw in (
        loader.next,
        loader.iterate,
        lambda c, info: loader.block(c, 2, info=info),
    ):
        with pytest.raises(ValueError, match="'shuffle' has no masks"):
            draw(loader.start(), info=True)
    with pytest.raises(ValueError, match="prefetch"):
        loader.iterate(loader.start(), prefetch=-1)
    for sharding in (jax.P("d"), jax.make_mesh((1,), ("d",)), "d"):
        with pytest.raises(TypeError, match=r"NamedSharding\(mesh, "):
            loader.iterate(loader.start(), sharding=sharding)
    with pytest.raises(ValueError, match="`k`"):
        loader.block(loader.start(), 0)
    with pytest.raises(Exception, match="Cursor"):
        loader.next(0)
    cursor = loader.start()
    loader.close()
    loader.close()
    for use in (loader.next, loader.iterate):
        with pytest.raises(RuntimeError, match="closed"):
            use(cursor)
