"""Any sequence of ways to draw, beside a list of the rows that have to come."""

import functools as ft
import itertools
import pathlib

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
from faults import jobs
from faults.zygote import Zygote
from loading import programs
from loading.programs import KINDS, LoaderSettings


pytestmark = pytest.mark.once


COUNTS = (7, 12)
SIZES = (2, 4, 5)
ORDERS = ("sequential", "shuffle", "epochs", "independent")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    found = str(tmp_path_factory.mktemp("stored"))
    programs.store(found, COUNTS)
    return found


# Compiled programs are kept for each loader.
@ft.cache
def loader_of(folder: str, make: LoaderSettings) -> data.Loader:
    return make.loader(folder)


@ft.cache
def epoch_of(data: Rows, order: str, seed: int, epoch: int) -> list[int]:
    """The rows of an epoch, by NumPy."""
    words = np.uint32(seed), np.uint32(epoch)
    name = "shuffle" if order == "epochs" else order
    found = rows(name, data, *words, np.arange(data.total, dtype=np.uint32))
    if order != "independent":
        assert sorted(found.tolist()) == list(range(data.total))
    return found.tolist()


class Expected:
    """Where a loader has to be, and what comes next."""

    def __init__(self, make: LoaderSettings, seed: int) -> None:
        self.data, self.order, self.seed = make.rows, make.order, seed
        self.epoch = self.position = 0

    def batch(self, size: int) -> list[int]:
        """The rows of the next batch that count."""
        found: list[int] = []
        while len(found) < size:
            rows = epoch_of(self.data, self.order, self.seed, self.epoch)
            some = rows[self.position : self.position + size - len(found)]
            found += some
            self.position += len(some)
            if self.position == self.data.total:
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
    st.tuples(st.just("vmap"), st.integers(1, 4)),
    st.tuples(st.just("iterate"), st.integers(1, 4), st.integers(0, 3), st.booleans()),
    st.tuples(st.just("save"), st.sampled_from(SIZES), st.sampled_from((1, 2, 5))),
    st.tuples(
        st.just("other"),
        st.sampled_from((1, 2, 5)),
        st.sampled_from(KINDS[:3]),
    ),
    st.tuples(st.just("map")),
    st.tuples(st.just("start"), st.integers(0, 2)),
    st.tuples(st.just("close")),
)


@given(
    st.builds(
        LoaderSettings,
        st.sampled_from(KINDS),
        st.sampled_from(COUNTS),
        st.sampled_from(ORDERS),
        st.sampled_from(SIZES),
        st.just(1),
    ),
    st.integers(0, 2),
    st.lists(OPERATIONS, min_size=3, max_size=10),
    st.sampled_from(AxisType),
)
@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_a_sequence_of_draws(tmp_path, folder, make, seed, operations, axes):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(axes,))
    count = make.total
    loader = loader_of(folder, make)
    cursor, expected = loader.start(seed), Expected(make, seed)
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
            case "vmap", n:
                pair = [cursor_at(loader, cursor), loader.start(seed + 1)]
                pair = jax.tree.map(lambda *x: jnp.stack(x), *pair)
                eqx_ckpt.tree_serialise_leaves(tmp_path / "pair", pair, overwrite=True)
                pair = eqx_ckpt.tree_deserialise_leaves(tmp_path / "pair", pair)
                other = Expected(make, seed + 1)
                for _ in range(n):
                    pair, rows, masks = draw_each(loader, pair)
                    found.append((rows[0], masks[0]))
                    assert counting(rows[1], masks[1]) == other.batch(make.size)
                cursor = jax.tree.map(lambda x: x[0], pair)
            case "iterate", n, prefetch, is_sharded:
                place = NamedSharding(mesh, jax.P("d")) if make.size % 2 == 0 else None
                batches = loader.iterate(
                    cursor,
                    prefetch=prefetch,
                    sharding=place if is_sharded else None,
                    info=True,
                )
                drawn = [*itertools.islice(batches, n)]
                cursor = drawn[-1][0]
                found = [(batch["i"], info.mask) for _, batch, info in drawn]
            case "save", size, cache:
                path = tmp_path / "c"
                before, make = make.size, make._replace(size=size, cache=cache)
                if before != size:
                    # Without a restore that accepts it, it is another loader's.
                    with pytest.raises(ValueError, match=f"batch_size={before} "):
                        loader_of(folder, make).next(cursor)
                eqx_ckpt.tree_serialise_leaves(path, cursor, overwrite=True)
                loader = loader_of(folder, make)
                like = loader.start(accept_any=True)
                cursor = eqx_ckpt.tree_deserialise_leaves(path, like)
                # From here on, with these settings.
                eqx_ckpt.tree_serialise_leaves(path, cursor, overwrite=True)
                cursor = eqx_ckpt.tree_deserialise_leaves(path, loader.start())
            case "other", cache, kind:
                # Stored rows come in an order of their own.
                kind = "stored" if make.kind == "stored" else kind
                make = make._replace(cache=cache, kind=kind)
                loader = loader_of(folder, make)
            case ("map",):
                seen, numbers = loader.map(seen_rows, jnp.zeros(count, int))
                assert seen.tolist() == [1] * count
                assert numbers.ravel()[:count].tolist() == list(range(count))
            case "start", seed:
                cursor, expected = loader.start(seed), Expected(make, seed)
            case ("close",):
                loader.close()
                loader_of.cache_clear()
                for use in (loader.next, ft.partial(loader.block, k=1), loader.iterate):
                    with pytest.raises(RuntimeError, match="is closed"):
                        use(cursor)
                loader = loader_of(folder, make)
        for rows, mask in found:
            assert counting(rows, mask) == expected.batch(make.size), (
                number,
                operation,
            )
        at = int(cursor.epoch), int(cursor.position)
        assert at == (expected.epoch, expected.position), (number, operation)


def seen_rows(seen, batch, mask):
    return seen.at[batch["i"]].add(mask), batch["i"]


def cursor_at(loader, cursor):
    """The same position, with no batches fetched, but room for them."""
    return data.Cursor(cursor.seed, cursor.epoch, cursor.position, loader.start().block)


@eqx.filter_jit
def draw_each(loader, cursors):
    """The next batch of several cursors."""

    def draw(cursor):
        cursor, batch, info = loader.next(cursor, info=True)
        return cursor, batch["i"], info.mask

    return jax.vmap(draw)(cursors)


@eqx.filter_jit
def scan(loader, cursor, n: int):
    def step(cursor, _):
        cursor, batch, info = loader.next(cursor, info=True)
        return cursor, (batch["i"], info.mask)

    return jax.lax.scan(step, cursor, length=n)


@pytest.mark.slow
def test_jobs_of_other_sizes(zygote: Zygote, disk: pathlib.Path) -> None:
    """Each job goes on with all cursors of the last one."""
    chance = np.random.default_rng(32)
    programs.store(str(disk), (10, 13))
    made = zip(KINDS, (10, 13, 10, 13), ORDERS, (4, 8, 4, 8), (1, 2, 3, 1), strict=True)
    makes = [LoaderSettings(*one) for one in made]
    models = [Expected(make, seed) for seed, make in enumerate(makes)]
    for turn, (processes, devices) in enumerate(((2, 2), (1, 4), (4, 1))):
        operations = [
            [
                (str(chance.choice(("next", "iterate"))), int(chance.integers(1, 4)))
                for _ in range(2)
            ]
            for _ in makes
        ]
        args = processes, devices, programs.draw, str(disk), makes, operations, not turn
        found = zygote.call(jobs.values, *args)
        for number, (make, model) in enumerate(zip(makes, models, strict=True)):
            for parts in zip(*(process[number] for process in found), strict=True):
                rows: dict[int, int] = {}
                for here, mask in parts:
                    assert mask == parts[0][1]
                    assert here == {k: rows.setdefault(k, v) for k, v in here.items()}
                drawn = [rows[i] for i in range(make.size)]
                assert counting(drawn, parts[0][1]) == model.batch(make.size), number
