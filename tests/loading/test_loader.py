"""Loaders: equal cursors give equal batches, however they are drawn."""

import gc
import itertools
import pickle
import threading
import time
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import eqx_ckpt
from eqx_ckpt import data
from versions import thinned


ORDERS = ["sequential", "shuffle", "epochs", "independent"]


def digits(**kwargs) -> data.ArrayDataSource:
    from sklearn.datasets import load_digits  # It takes seconds.

    images, labels = load_digits(return_X_y=True)
    return data.ArrayDataSource(
        x=images.astype(np.float32), y=labels, i=np.arange(len(images)), **kwargs
    )


def small(count: int = 10, **kwargs) -> data.ArrayDataSource:
    return data.ArrayDataSource(i=np.arange(count), x=np.ones((count, 2)), **kwargs)


def drawn(loader, cursor, n) -> np.ndarray:
    """The rows of the next batches, by `next` in a scan."""

    @eqx.filter_jit
    def run(loader, cursor):
        def step(cursor, _):
            cursor, batch = loader.next(cursor)
            return cursor, batch["i"]

        return jax.lax.scan(step, cursor, length=n)

    return np.asarray(run(loader, cursor)[1])


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


@pytest.mark.once
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
    manifest = eqx_ckpt.inspect.read_manifest(tmp_path / "c")
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
    assert not eqx_ckpt.tree_match(tmp_path / "c", other.start()).ok
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


@pytest.mark.parametrize("cache", [1, 3])
def test_a_step_may_donate_its_cursor(cache):
    loader = data.Loader(small(), 4, cache=cache)
    expected = drawn(loader, loader.start(), 6)
    step = eqx.filter_jit(lambda c: jax.tree.map(jnp.negative, c), donate="all")
    begun = loader.start()
    batches = loader.iterate(begun)
    step(begun)
    found = []
    for cursor, batch in itertools.islice(batches, 6):
        found.append(batch["i"])
        step(cursor)
        assert cursor.position.is_deleted()
    assert np.array_equal(found, expected)


@pytest.mark.once
@pytest.mark.parametrize(
    ("cache", "others"), thinned([(5, 3), (5, 5), (5, 1), (1, 5)], 4)
)
def test_a_cursor_holds_no_rows_of_another_loader(cache, others):
    count = 40
    rows, negative = np.arange(count), -np.arange(count)
    first = data.Loader(data.ArrayDataSource(i=rows), 4, cache=cache)
    same = data.Loader(data.ArrayDataSource(i=negative), 4, cache=others)
    keys = data.Loader(data.ArrayDataSource(j=negative.astype(float)), 4, cache=others)
    expected = drawn(first, first.start(3), 6)
    cursors = {0: first.start(3), 1: same.start(3), 2: keys.start(3)}
    # Each loader draws from the cursors of all, in turn and in a scan.
    for start in cursors.values():
        cursor = start
        for step, (loader, name) in enumerate(3 * [(first, "i"), (same, "i")]):
            cursor, batch = loader.next(cursor)
            assert np.array_equal(np.abs(batch[name]), expected[step])
            assert (batch[name] >= 0).all() == (loader is first)
        assert np.array_equal(drawn(first, start, 6), expected)
        assert np.array_equal(drawn(same, start, 6), -expected)
        (_, batch), *_ = itertools.islice(keys.iterate(start), 1)
        assert np.array_equal(batch["j"], -expected[0])


def test_a_cursor_of_another_process_holds_no_rows_of_this_one():
    loader = data.Loader(small(), 2, cache=3)
    cursor = loader.next(loader.start())[0]
    other = pickle.loads(pickle.dumps(loader))
    assert np.array_equal(other.next(cursor)[1]["i"], loader.next(cursor)[1]["i"])
    other.close()
    loader.next(cursor)


def test_the_position_of_another_batch_size_repeats_no_row(tmp_path):
    before = data.Loader(small(230), 50, order="epochs")
    cursor = before.block(before.start(1), 3)[0]
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", cursor)
    seen = before.block(before.start(1), 3)[1]["i"].ravel().tolist()
    loader = data.Loader(small(230), 100, order="epochs")
    like = loader.start(accept_any=True)
    cursor = eqx_ckpt.tree_deserialise_leaves(tmp_path / "c", like)
    cursor, batch, info = loader.next(cursor, info=True)
    seen += batch["i"][info.mask].tolist()
    assert sorted(seen) == list(range(230))
    assert (int(cursor.epoch), int(cursor.position)) == (1, 0)
    _, rows, infos = loader.block(cursor, 3, info=True)
    assert sorted(rows["i"][infos.mask].tolist()) == list(range(230))
    # A source with fewer rows: its next epoch.
    fewer = data.Loader(small(120), 100, order="epochs")
    like = fewer.start(accept_any=True)
    cursor = eqx_ckpt.tree_deserialise_leaves(tmp_path / "c", like)
    cursor, _, info = fewer.next(cursor, info=True)
    assert (int(info.count), int(cursor.epoch), int(cursor.position)) == (100, 1, 100)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("end", thinned(["close", "delete"], 2))
def test_the_data_are_freed(on_device, end):
    rows = np.arange(10)
    lives = [weakref.ref(rows)]
    source = data.ArrayDataSource(on_device=on_device, i=rows)
    loader = data.Loader(source, 2, cache=2)
    lives += map(weakref.ref, jax.tree.leaves(loader))
    assert len(lives) == 1 + on_device
    step = eqx.filter_jit(lambda loader, cursor: loader.next(cursor))
    cursor, _ = step(loader, loader.start())
    cursor, _ = loader.next(cursor)
    loader.block(cursor, 2)
    loader.map(lambda carry, batch, mask: (carry + mask.sum(), None), 0)
    for _ in zip(range(3), loader.iterate(cursor), strict=False):
        pass
    del source, rows
    if end == "close":
        loader.close()
    else:
        del loader
    # The thread of an iterator may still hold a batch.
    deadline = time.monotonic() + 30
    while any(life() is not None for life in lives) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not any(life() is not None for life in lives)


def test_loaders_share_the_arrays_of_a_source():
    source = small(on_device=True)
    first, second = data.Loader(source, 2), data.Loader(source, 5)
    (i, x), others = jax.tree.leaves(first), jax.tree.leaves(second)
    assert i is others[0]
    assert x is others[1]
    first.close()
    assert second.next(second.start())[1]["i"].shape == (5,)
    lives = weakref.ref(i), weakref.ref(x)
    second.close()
    del i, x, others
    gc.collect()
    assert [life() for life in lives] == [None, None]
    third = data.Loader(source, 5, order="sequential")
    assert third.next(third.start())[1]["i"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("cache", [1, 2])
def test_a_compiled_program_does_not_draw_after_close(cache, on_device):
    loader = data.Loader(small(on_device=on_device), 2, cache=cache)
    draws = [
        eqx.filter_jit(lambda it, cursor: it.next(cursor)),
        eqx.filter_jit(lambda it, cursor: it.block(cursor, 2)),
        eqx.filter_jit(lambda it, _: it.map(lambda carry, *_: (carry, None), 0)),
    ]
    cursor = loader.start()
    for draw in draws:
        jax.block_until_ready(draw(loader, cursor))
    closing_over = jax.jit(lambda cursor: loader.next(cursor))
    if not on_device:
        for _ in range(cache):
            cursor, batch = closing_over(cursor)
        jax.block_until_ready(batch)
    begun = [loader.iterate(loader.start(), prefetch=n) for n in (0, 2)]
    for batches in begun:
        next(batches)
    loader.close()
    for batches in begun:
        with pytest.raises(RuntimeError, match="The loader is closed"):
            next(batches)
    for draw in draws:
        with pytest.raises(RuntimeError, match="The loader is closed"):
            draw(loader, cursor)
    if not on_device:
        by_jax = jax.errors.JaxRuntimeError, ValueError
        with pytest.raises(by_jax, match="The loader is closed"):
            jax.block_until_ready(closing_over(cursor))
    for use in (loader.next, loader.iterate, lambda c: loader.block(c, 2)):
        with pytest.raises(RuntimeError, match="is closed"):
            use(cursor)
    with pytest.raises(RuntimeError, match="is closed"):
        loader.map(lambda carry, *_: (carry, None), 0)
    loader.close()


def test_no_program_keeps_the_arrays_of_a_loader():
    loader = data.Loader(small(on_device=True), 2)
    cursor = loader.start()
    for draw in (
        loader.next,
        lambda cursor: loader.block(cursor, 2),
        lambda _: loader.map(lambda carry, *_: (carry, None), 0),
    ):
        with pytest.raises(ValueError, match="closes over a loader with `on_device"):
            jax.jit(draw)(cursor)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), cursor)
    assert jax.vmap(loader.next)(many)[1]["i"].shape == (2, 2)


def test_map_does_not_hold_the_number_of_each_row():
    count = 1_000_000
    loader = data.Loader(data.ArrayDataSource(x=np.ones(count, np.int8)), 100, cache=10)

    def total(carry, batch, mask):
        return carry + jnp.sum(batch["x"] * mask, dtype=jnp.int32), None

    program = jax.jit(lambda: loader.map(total, jnp.int32(0))).lower().compile()
    assert program()[0] == count
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < count / 4


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("cache", thinned([3, 1], 2))
def test_on_a_mesh(kind, cache):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    rows = NamedSharding(mesh, jax.P("d"))
    loader = data.Loader(small(12), 4, cache=cache)
    seeds = [loader.start(seed) for seed in range(4)]
    expected = np.stack([drawn(loader, cursor, 2)[1] for cursor in seeds])
    stacked = jax.tree.map(lambda *xs: jax.device_put(jnp.stack(xs), rows), *seeds)
    draw = jax.jit(jax.vmap(loader.next))
    with jax.set_mesh(mesh):
        assert np.array_equal(draw(draw(stacked)[0])[1]["i"], expected)
        assert np.array_equal(drawn(loader, seeds[1], 2)[1], expected[1])
    assert np.array_equal(draw(draw(stacked)[0])[1]["i"], expected)
    for placed in (jax.P("d"), jax.P(None, "d")):
        x = jax.device_put(jnp.arange(48.0).reshape(12, 4), NamedSharding(mesh, placed))
        there = data.Loader(data.ArrayDataSource(on_device=True, x=x), 4, cache=cache)
        cursor, _ = there.next(there.start(2))
        found = np.asarray(there.next(cursor)[1]["x"])
        assert np.array_equal(found[:, 0] // 4, expected[2])
        draw_there = eqx.filter_jit(lambda it, cursor: jax.vmap(it.next)(cursor))
        found = np.asarray(draw_there(there, draw_there(there, stacked)[0])[1]["x"])
        assert np.array_equal(found[:, :, 0] // 4, expected)


KINDS = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, KINDS)], ids=str)
def test_rows_and_cursors_on_the_same_axes(kinds):
    mesh = jax.make_mesh((2, 2), ("a", "b"), kinds)
    x = np.arange(48.0, dtype=np.float32).reshape(12, 4)
    first = data.Loader(data.ArrayDataSource(x=x), 4)
    seeds = [first.start(seed) for seed in range(4)]
    expected = np.stack([first.next(cursor)[1]["x"] for cursor in seeds])
    draw = eqx.filter_jit(lambda it, cursor: jax.vmap(it.next)(cursor))
    for chains, rows in (
        (jax.P("b"), jax.P("a", "b")),
        (jax.P("a"), jax.P(None, ("a", "b"))),
        (jax.P(("a", "b")), jax.P("b", "a")),
    ):
        there = jax.device_put(x, NamedSharding(mesh, rows))
        loader = data.Loader(data.ArrayDataSource(on_device=True, x=there), 4)
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *seeds)
        stacked = jax.device_put(stacked, NamedSharding(mesh, chains))
        assert np.array_equal(draw(loader, stacked)[1]["x"], expected)


def test_a_sharding_that_does_not_fit_is_named():
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    loader = data.Loader(small(8), 4)
    for spec, error in (
        (jax.P("a", "b"), r"'i' of a batch, int32\[4\]: has more dimensions"),
        (jax.P(None, ("a", "b")), r"'[ix]' of a batch"),
    ):
        with pytest.raises(ValueError, match=error):
            loader.iterate(loader.start(), sharding=NamedSharding(mesh, spec))


def test_an_iterator_may_end_in_its_own_thread():
    may_end, has_ended = threading.Event(), threading.Event()

    class Ending(list[dict[str, int]]):
        calls = 0

        def __getitems__(self, indices):
            if self.calls and may_end.wait(60):
                batches.close()
                has_ended.set()
            self.calls += 1
            return [self[i] for i in indices]

    dataset = Ending({"i": i} for i in range(10))
    loader = data.Loader(data.RandomAccessDataSource(dataset), 2)
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


@pytest.mark.parametrize("order", ["sequential", "shuffle", "independent"])
def test_all_rows_count_in_the_other_orders(order):
    loader = data.Loader(small(10), 4, order=order)
    *_, info = loader.next(loader.start(), info=True)
    assert info.mask.tolist() == [True] * 4
    assert (int(info.count), info.batch_size, info.total) == (4, 4, 10)
    *_, info = loader.block(loader.start(), 3, info=True)
    assert info.mask.all()
    assert info.count.tolist() == [4, 4, 4]
    *_, info = next(loader.iterate(loader.start(), info=True))
    assert info.mask.all()


@pytest.mark.once
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("cache", [1, 4, 100])
def test_map_counts_each_row_once(on_device, cache):
    loader = data.Loader(digits(on_device=on_device), 100, cache=cache)

    def count(seen, batch, mask):
        assert batch["x"].shape == (100, 64)
        return seen.at[batch["i"]].add(mask), mask.sum()

    whole = eqx.filter_jit(lambda it: it.map(count, jnp.zeros(1797, int)))
    seen, counts = whole(loader)
    assert np.array_equal(seen, np.ones(1797))
    assert counts.tolist() == 17 * [100] + [97]
    assert loader.map(count, jnp.zeros(1797, int))[1].tolist() == counts.tolist()
    _, empty = loader.map(lambda carry, *_: (carry, jnp.zeros((2, 0))), None)
    assert empty.shape == (18, 2, 0)


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
    source = data.ArrayDataSource(on_device=on_device, **arrays)
    loader = data.Loader(source, 5, order="sequential", cache=2)
    _, batch = loader.next(loader.start())
    for name, array in arrays.items():
        native = array.dtype.newbyteorder("=")
        expected = array[:5].astype(jax.dtypes.canonicalize_dtype(native))
        assert batch[name].dtype == expected.dtype
        assert np.array_equal(batch[name], expected)


def test_integers_that_do_not_fit_are_an_error():
    source = data.ArrayDataSource(i=np.array([1, 2**40]))
    loader = data.Loader(source, 2, order="sequential")
    with pytest.raises(Exception, match="do not fit"):
        jax.block_until_ready(loader.next(loader.start()))
    (_, batch), *_ = itertools.islice(loader.iterate(loader.start()), 1)
    assert batch["i"].tolist() == [1, 2**40]
    with pytest.raises(OverflowError, match="do not fit"):
        data.ArrayDataSource(on_device=True, i=np.array([1, 2**40]))


@pytest.mark.parametrize("order", ORDERS)
def test_the_strictest_promotion(order, tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"i": np.arange(50)})
    stored = data.StoredDataSource(tmp_path / "c")
    for source, size in ((stored, 8), (data.ArrayDataSource(i=np.arange(70_000)), 700)):
        loader = data.Loader(source, size, order=order, cache=2)

        def all_ways(cursor, loader=loader):
            cursor, _ = loader.next(cursor)
            loader.map(lambda carry, *_: (carry, None), None)
            return loader.block(cursor, 3)

        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            _, rows = jax.eval_shape(all_ways, loader.start())
        assert rows["i"].shape == (3, size)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_integers_of_64_bits_where_they_are_enabled(prefetch):
    rows = {"i": np.array([1, 2**40]), "x": np.array([1 / 3, 2 / 3])}
    device = jax.devices()[0]
    with jax.enable_x64(True):
        loader = data.Loader(data.ArrayDataSource(**rows), 2, order="sequential")
        begun = loader.start()
        batches = loader.iterate(begun, prefetch=prefetch, sharding=device)
    narrow = loader.iterate(begun, prefetch=prefetch, sharding=device)
    _, batch = next(batches)
    assert all(np.array_equal(batch[name], rows[name]) for name in rows)
    with pytest.raises(OverflowError, match="do not fit into int32"):
        next(narrow)


@pytest.mark.parametrize("on_device", [False, True])
def test_arrays_that_are_no_numbers_are_named(on_device):
    keys = jax.random.split(jax.random.key(0), 4)
    for bad in (["a", "b"], [{}], [[1], [2, 3]], keys):
        with pytest.raises(TypeError, match=r"^'x' .*or leave it out"):
            data.ArrayDataSource(on_device=on_device, x=bad)
    loader = data.Loader(
        data.ArrayDataSource(on_device=on_device, x=[1, 2, 3]), 3, order="sequential"
    )
    assert loader.next(loader.start())[1]["x"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch_size": 11}, "10 rows"),
        ({"batch_size": 0}, "at least 1"),
        ({"batch_size": -1}, "at least 1"),
        ({"batch_size": True}, "at least 1"),
        ({"batch_size": 2, "cache": 0}, "cache"),
        ({"batch_size": 2, "order": "random"}, "'shuffle'"),
    ],
)
def test_bad_arguments(arguments, error):
    with pytest.raises(Exception, match=error):
        data.Loader(small(), **arguments)


def test_bad_uses():
    with pytest.raises(ValueError, match="first axis"):
        data.ArrayDataSource(x=np.ones(3), y=np.ones(4))
    with pytest.raises(ValueError, match="no arrays"):
        data.ArrayDataSource()
    with pytest.raises(TypeError, match="'t'"):
        data.ArrayDataSource(t=np.array(["a", "b"]))
    with pytest.raises(ValueError, match="`exclude` fewer"):
        data.RandomAccessDataSource([{"x": 1}], exclude=["x"])
    with pytest.raises(ValueError, match="`prefix` is 'a'"):
        data.StoredDataSource(x="x.zarr", prefix="a")
    with pytest.raises(Exception, match="Source"):
        data.Loader(np.ones(3), 1)
    loader = data.Loader(small(), 2)
    with pytest.raises(ValueError, match="seed"):
        loader.start(-1)
    with pytest.raises(ValueError, match="prefetch"):
        loader.iterate(loader.start(), prefetch=-1)
    for sharding in (jax.P("d"), jax.make_mesh((1,), ("d",)), "d"):
        with pytest.raises(TypeError, match=r"NamedSharding\(mesh, "):
            loader.iterate(loader.start(), sharding=sharding)
    for k in (0, 2**31):
        with pytest.raises(ValueError, match=f"`k` is {k}"):
            loader.block(loader.start(), k)
    huge = data.ArrayDataSource(x=np.broadcast_to(np.uint8(0), 2**31))
    for source, how in ((huge, {}), (small(), {"cache": 2**30})):
        with pytest.raises(ValueError, match="31 bits"):
            data.Loader(source, 2, **how)
    with pytest.raises(Exception, match="(?i)cursor"):
        loader.next(0)
    cursor = loader.start()
    several = jax.tree.map(lambda x: jnp.stack([x, x, x]), cursor)
    for use in (loader.next, loader.iterate, lambda c: loader.block(c, 2)):
        with pytest.raises(ValueError, match=r"is several, of the shape \(3,\)"):
            use(several)
    loader.close()
    loader.close()
    for use in (loader.next, loader.iterate):
        with pytest.raises(RuntimeError, match="closed"):
            use(cursor)
