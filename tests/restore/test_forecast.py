"""What `tree_match` says of a restore is what it takes, and `max_host_bytes` bounds it.

Arrays below 2 MiB are seen by `tracemalloc`; larger ones are mapped.
"""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from helpers import assert_same
from support import chunk_grid, forecast, read_items
from versions import thinned


KIB, MIB = 2**10, 2**20
COUNT = 12
# Beside arrays: what Python and JAX keep for each, and what they load once.
SPARE = MIB


def tree(dtype: Any = jnp.float32, size: int = MIB // 4) -> dict[str, jax.Array]:
    """Arrays of 1 MiB, if nothing else is said."""
    return {f"w{i}": (jnp.arange(size) % 99 + i).astype(dtype) for i in range(COUNT)}


def structs(arrays: Any, dtype: Any = None) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype), arrays
    )


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunk_grid, "TARGET_BYTES", 64 * KIB)


@pytest.fixture
def accelerator(monkeypatch):
    """Take the CPU's devices for ones with memory of their own."""

    def is_on_host(read: Any) -> bool:
        return read.becomes.kind not in ("jax", "key")

    monkeypatch.setattr(read_items, "is_on_host", is_on_host)
    monkeypatch.setattr(forecast, "is_on_host", is_on_host)


class Case(NamedTuple):
    """What is restored of which tree, and how."""

    like: Any
    how: dict[str, Any] = {}
    save: dict[str, Any] = {}
    dtype: Any = jnp.float32


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("a", "b"))


def as_numpy(x: Any) -> np.ndarray:
    return np.broadcast_to(np.zeros((), x.dtype), x.shape)


CASES: dict[str, Callable[[], Case]] = {
    "jax": lambda: Case(structs(tree())),
    "numpy": lambda: Case(jax.tree.map(as_numpy, structs(tree()))),
    "wider": lambda: Case(structs(tree()), {"casting": "safe"}, dtype=jnp.bfloat16),
    "narrower": lambda: Case(structs(tree(), jnp.bfloat16), {"casting": "same_kind"}),
    "sharded": lambda: Case(
        structs(tree()), {"sharding": NamedSharding(mesh(), P(("a", "b")))}
    ),
    "replicated": lambda: Case(
        structs(tree()), {"sharding": NamedSharding(mesh(), P())}
    ),
    "compressed": lambda: Case(structs(tree()), save={"compression": "zstd"}),
    "database": lambda: Case(structs(tree()), save={"layout": "ocdbt"}),
    "part": lambda: Case(
        structs(tree()), {"where": lambda t: [t[f"w{i}"] for i in range(8)]}
    ),
    "sliced": lambda: Case(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.size // 2,), x.dtype), tree()),
        {"transform": lambda t: jax.tree.map(lambda x: x[: x.size // 2], t)},
    ),
}


def traced(restore: Callable[[], Any]) -> tuple[Any, int]:
    """What a restore returns, and the most memory that it had at a time."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        found = jax.block_until_ready(restore())
        return found, tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", thinned(CASES, 3))
def test_host_memory_is_what_was_forecast(tmp_path, name, small_chunks):
    like, how, save, dtype = CASES[name]()
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree(dtype), **save)
    match = eqx_ckpt.tree_match(tmp_path / "new", like, **how)
    assert match.least_host_bytes <= match.host_bytes

    def restore(most: Any = None) -> Any:
        return eqx_ckpt.tree_deserialise_leaves(
            tmp_path / "new", like, max_host_bytes=most, **how
        )

    restore()  # What is loaded once.
    expected, peak = traced(restore)
    assert 0.9 * match.host_bytes - SPARE <= peak <= match.host_bytes + SPARE
    found, peak = traced(lambda: restore(match.least_host_bytes))
    assert peak <= match.least_host_bytes + SPARE
    assert_same(found, expected)


_opened: list[str] = []


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _opened:
        _opened.append(str(args[0]))


sys.addaudithook(_note)


@pytest.mark.parametrize("name", [n for n in CASES if n != "database"])
def test_requests_are_the_files_that_are_read(tmp_path, name, small_chunks):
    like, how, save, dtype = CASES[name]()
    path = tmp_path / "new"
    eqx_ckpt.tree_serialise_leaves(path, tree(dtype), **save)
    match = eqx_ckpt.tree_match(path, like, **how)
    _opened.append("from here on")
    try:
        eqx_ckpt.tree_deserialise_leaves(path, like, **how)
        files = [Path(name).name for name in _opened if name.startswith(str(path))]
    finally:
        _opened.clear()
    assert match.requests == sum(name.startswith("c.") for name in files)


DTYPES = [
    *("float32", "bfloat16", "int8", "bool", "complex64", "int4", "float8_e4m3fn"),
    *("float64", "int64"),
]


@pytest.mark.parametrize("where", ["default", "committed", "sharded"])
def test_pieces_become_the_same_array(tmp_path, small_chunks, accelerator, where):
    """Each region arrives on its devices in pieces, which are put together there."""
    with jax.enable_x64(True):
        bits = np.random.default_rng(0).integers(0, 7, (256, 512))
        saved = {dtype: jnp.asarray(bits).astype(dtype) for dtype in DTYPES}
        like = structs(saved)
        sharding = {
            "default": None,
            "committed": jax.devices()[3],
            "sharded": NamedSharding(mesh(), P("b", None)),
        }[where]
        eqx_ckpt.tree_serialise_leaves(tmp_path / "new", saved)
        how = {"sharding": sharding}
        least = eqx_ckpt.tree_match(tmp_path / "new", like, **how).least_host_bytes
        found = eqx_ckpt.tree_deserialise_leaves(
            tmp_path / "new", like, max_host_bytes=least, **how
        )
        usual = eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", like, **how)
    assert_same(found, saved)
    for name, x in usual.items():
        assert found[name].sharding == x.sharding
        assert found[name].committed == x.committed == (where != "default")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_of_an_average_counts(tmp_path, dtype, small_chunks):
    for k in range(3):
        saved = jax.tree.map(lambda x, k=k: x * (k + 1), tree(dtype))
        eqx_ckpt.tree_serialise_leaves(tmp_path / str(k), saved)
    source = eqx_ckpt.average([tmp_path / str(k) for k in range(3)])
    like = structs(tree(dtype))
    match = eqx_ckpt.tree_match(source, like)

    def restore(most: Any = None) -> Any:
        return eqx_ckpt.tree_deserialise_leaves(source, like, max_host_bytes=most)

    restore()  # What is loaded once.
    expected, peak = traced(restore)
    assert peak <= match.host_bytes + SPARE
    found, peak = traced(lambda: restore(match.least_host_bytes))
    assert peak <= match.least_host_bytes + SPARE
    assert_same(found, expected)
    with pytest.raises(ValueError, match=f"takes {match.least_host_bytes} bytes"):
        restore(match.least_host_bytes - 1)


def test_an_accelerator_needs_little_host_memory(tmp_path, small_chunks, accelerator):
    like = structs(tree())
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree())
    match = eqx_ckpt.tree_match(tmp_path / "new", like)
    assert match.host_bytes > COUNT * MIB
    assert match.least_host_bytes < MIB
    most = match.least_host_bytes
    found, peak = traced(
        lambda: eqx_ckpt.tree_deserialise_leaves(
            tmp_path / "new", like, max_host_bytes=most
        )
    )
    assert peak <= most + SPARE
    assert_same(found, tree())


def test_keys_and_what_is_computed_in_pieces(tmp_path, small_chunks, accelerator):
    keys = jax.random.split(jax.random.key(0), 30_000)
    saved = {
        "keys": keys,
        **tree(),
        "rows": [jnp.ones((64, 512)) * i for i in range(3)],
    }

    def transform(old: Any) -> Any:
        rows = [*old["rows"].values()] if isinstance(old["rows"], dict) else old["rows"]
        return {
            "keys": old["keys"],
            "twice": old["w0"] * 2,
            "stack": jnp.stack(rows),
            "part": old["w1"][:1000],
        }

    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", saved)
    expected = transform(saved)
    like = structs({k: v for k, v in expected.items() if k != "keys"})
    like["keys"] = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    how = {"transform": transform}
    least = eqx_ckpt.tree_match(tmp_path / "new", like, **how).least_host_bytes
    found = eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "new", like, max_host_bytes=least, **how
    )
    assert_same(found, expected)


def test_less_than_the_least_is_refused_before_anything_is_read(tmp_path):
    like = structs(tree())
    path = tmp_path / "run"
    with eqx_ckpt.CheckpointManager(path) as manager:
        manager.save(1, tree())
        manager.wait()
        step = manager.path(1)
        least = eqx_ckpt.tree_match(step, like).least_host_bytes
        assert_same(manager.restore(like, max_host_bytes=least), tree())
        for chunk in path.rglob("c.*"):
            chunk.unlink()
        for restore in (
            lambda: eqx_ckpt.tree_deserialise_leaves(
                step, like, max_host_bytes=least - 1
            ),
            lambda: eqx_ckpt.restore_or_init(step, tree, max_host_bytes=least - 1),
            lambda: manager.restore(like, max_host_bytes=least - 1),
        ):
            with pytest.raises(ValueError, match=f"takes {least} bytes") as e:
                restore()
            assert f"{COUNT * MIB} of them" in str(e.value)
            assert "`where`" in str(e.value)


def test_the_overview_says_it(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree())
    match = eqx_ckpt.tree_match(tmp_path / "new", structs(tree()))
    assert f"{match.nbytes} bytes to read in {COUNT} requests, with 1" in str(match)
