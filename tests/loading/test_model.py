"""Any sequence of ways to draw, beside a list of the rows that have to come."""

import functools as ft
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, HealthCheck, settings, strategies as st
from jax.sharding import AxisType, NamedSharding

import eqx_ckpt
from eqx_ckpt import data
from eqx_ckpt.data._order import Rows, rows


COUNTS = (7, 12)
SIZES = (2, 4, 5)
ORDERS = ("sequential", "shuffle", "epochs", "independent")


# Compiled programs are kept for each loader.
@ft.cache
def loader_of(count: int, order: str, size: int, cache: int, kind: str) -> data.Loader:
    rows = np.arange(count)
    if kind == "random access":
        source = data.RandomAccessDataSource([{"i": i} for i in rows])
    else:
        source = data.ArrayDataSource(on_device=kind == "on device", i=rows)
    return data.Loader(source, size, order=order, cache=cache)


@ft.cache
def epoch_of(count: int, order: str, seed: int, epoch: int) -> list[int]:
    """The rows of an epoch, by NumPy."""
    words = np.uint32(seed), np.uint32(epoch)
    name = "shuffle" if order == "epochs" else order
    found = rows(name, Rows(count), *words, np.arange(count, dtype=np.uint32))
    if order != "independent":
        assert sorted(found.tolist()) == list(range(count))
    return found.tolist()


class Expected:
    """Where a loader has to be, and what comes next."""

    def __init__(self, count: int, order: str, seed: int) -> None:
        self.count, self.order, self.seed = count, order, seed
        self.epoch = self.position = 0

    def batch(self, size: int) -> list[int]:
        """The rows of the next batch that count."""
        found: list[int] = []
        while len(found) < size:
            rows = epoch_of(self.count, self.order, self.seed, self.epoch)
            some = rows[self.position : self.position + size - len(found)]
            found += some
            self.position += len(some)
            if self.position == self.count:
                self.epoch, self.position = self.epoch + 1, 0
                if self.order == "epochs":
                    break
        return found


def counting(rows, mask) -> list[int]:
    return np.asarray(rows)[np.asarray(mask)].tolist()


OPERATIONS = st.one_of(
    st.tuples(st.just("next"), st.integers(1, 4)),
    st.tuples(st.just("scan"), st.just(3)),
    st.tuples(st.just("block"), st.integers(1, 3)),
    st.tuples(st.just("iterate"), st.integers(1, 4), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("save"), st.sampled_from(SIZES), st.sampled_from((1, 2, 5))),
    st.tuples(
        st.just("other"),
        st.sampled_from((1, 2, 5)),
        st.sampled_from(("array", "on device", "random access")),
    ),
    st.tuples(st.just("map")),
    st.tuples(st.just("start"), st.integers(0, 2)),
    st.tuples(st.just("close")),
)


@given(
    st.sampled_from(COUNTS),
    st.sampled_from(ORDERS),
    st.sampled_from(SIZES),
    st.integers(0, 2),
    st.lists(OPERATIONS, min_size=3, max_size=10),
    st.sampled_from(AxisType),
)
@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_sequence_of_draws(tmp_path, count, order, size, seed, operations, axes):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(axes,))
    cache, kind = 1, "array"
    loader = loader_of(count, order, size, cache, kind)
    cursor, expected = loader.start(seed), Expected(count, order, seed)
    for number, (operation, *arguments) in enumerate(operations):
        found = []
        match operation, *arguments:
            case "next", n:
                for _ in range(n):
                    cursor, batch, info = loader.next(cursor, info=True)
                    found.append((batch["i"], info.mask))
            case "scan", n:
                cursor, (rows, masks) = scan(loader, cursor, n)
                found = [*zip(rows, masks, strict=True)]
            case "block", k:
                cursor, rows, infos = loader.block(cursor, k, info=True)
                found = [*zip(rows["i"], infos.mask, strict=True)]
            case "iterate", n, prefetch, is_sharded:
                place = NamedSharding(mesh, jax.P("d")) if size % 2 == 0 else None
                batches = loader.iterate(
                    cursor,
                    prefetch=prefetch,
                    sharding=place if is_sharded else None,
                    info=True,
                )
                drawn = [*itertools.islice(batches, n)]
                cursor = drawn[-1][0]
                found = [(batch["i"], info.mask) for _, batch, info in drawn]
            case "save", other, cache:
                path = tmp_path / "c"
                if other != size:
                    # Without a restore that accepts it, it is another loader's.
                    refusing = loader_of(count, order, other, cache, kind)
                    with pytest.raises(ValueError, match=f"batch_size={size} "):
                        refusing.next(cursor)
                size = other
                eqx_ckpt.tree_serialise_leaves(path, cursor, overwrite=True)
                loader = loader_of(count, order, size, cache, kind)
                like = loader.start(accept_any=True)
                cursor = eqx_ckpt.tree_deserialise_leaves(path, like)
                # From here on, of this make-up.
                eqx_ckpt.tree_serialise_leaves(path, cursor, overwrite=True)
                cursor = eqx_ckpt.tree_deserialise_leaves(path, loader.start())
            case "other", cache, kind:
                loader = loader_of(count, order, size, cache, kind)
            case ("map",):
                seen, numbers = loader.map(seen_rows, jnp.zeros(count, int))
                assert seen.tolist() == [1] * count
                assert numbers.ravel()[:count].tolist() == list(range(count))
            case "start", seed:
                cursor, expected = loader.start(seed), Expected(count, order, seed)
            case ("close",):
                loader.close()
                loader_of.cache_clear()
                for use in (loader.next, ft.partial(loader.block, k=1), loader.iterate):
                    with pytest.raises(RuntimeError, match="is closed"):
                        use(cursor)
                loader = loader_of(count, order, size, cache, kind)
        for rows, mask in found:
            assert counting(rows, mask) == expected.batch(size), (number, operation)
        at = int(cursor.epoch), int(cursor.position)
        assert at == (expected.epoch, expected.position), (number, operation)


def seen_rows(seen, batch, mask):
    return seen.at[batch["i"]].add(mask), batch["i"]


@eqx.filter_jit
def scan(loader, cursor, n: int):
    def step(cursor, _):
        cursor, batch, info = loader.next(cursor, info=True)
        return cursor, (batch["i"], info.mask)

    return jax.lax.scan(step, cursor, length=n)
