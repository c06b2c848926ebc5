"""Statistics of leaves, compared with NumPy's of what was saved."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqx_ckpt


def saved(path, tree, **options):
    eqx_ckpt.tree_serialise_leaves(path, tree, **options)
    return eqx_ckpt.inspect.stats(path)


FLOATS = ["float32", "float16", "bfloat16", "float64", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(tmp_path, dtype):
    values = np.random.default_rng(0).normal(3, 2, (50, 70)).astype(dtype)
    wide = values.astype(float)
    found = saved(tmp_path / "c", {"w": values})["w"]
    assert (found.count, found.nan, found.inf) == (3500, 0, 0)
    assert (found.min, found.max) == (wide.min(), wide.max())
    assert math.isclose(found.mean, wide.mean(), rel_tol=1e-12)
    assert math.isclose(found.std, wide.std(), rel_tol=1e-12)
    assert math.isclose(found.norm, np.linalg.norm(wide), rel_tol=1e-12)


@pytest.mark.parametrize("power", [-1000, -600, 600, 1000])
def test_squares_that_no_float_holds(tmp_path, power):
    values = np.random.default_rng(2).normal(3, 2, 100_000)
    each = {"plain": values, "scaled": np.ldexp(values, power)}
    plain, scaled = saved(tmp_path / "c", each).values()
    for name in ("mean", "std", "norm"):
        expected = math.ldexp(getattr(plain, name), power)
        assert math.isclose(getattr(scaled, name), expected, rel_tol=1e-12)


def test_many_chunks(tmp_path):
    """In pieces, of a mean that is large beside the deviation."""
    values = np.random.default_rng(1).normal(1e6, 1, 5_000_000)
    values[[7, 4_000_000]] = np.nan
    values[4_999_999] = -np.inf
    fine = values[np.isfinite(values)]
    found = saved(tmp_path / "c", {"w": values, "v": np.zeros(3)})["w"]
    assert (found.count, found.nan, found.inf) == (5_000_000, 2, 1)
    assert (found.min, found.max) == (fine.min(), fine.max())
    assert math.isclose(found.mean, fine.mean(), rel_tol=1e-12)
    assert math.isclose(found.std, fine.std(), rel_tol=1e-9)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int4", "uint2", "bool", ">i4"])
def test_integers(tmp_path, dtype):
    values = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    found = saved(tmp_path / "c", {"w": values})["w"]
    assert (type(found.min), found.min, found.max) == (int, 0, 1)
    assert (found.count, found.mean, found.norm) == (6, 4 / 6, 2)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_that_no_float_holds(tmp_path, dtype):
    low, high = np.iinfo(dtype).min + 1, np.iinfo(dtype).max - 1
    found = saved(tmp_path / "c", {"w": np.array([low, high], dtype)})["w"]
    assert (found.min, found.max) == (low, high)


def test_complex_numbers_have_no_order(tmp_path):
    values = np.array([1 + 2j, 3 - 1j, complex(np.nan, 0), complex(0, np.inf)])
    found = saved(tmp_path / "c", {"w": values})["w"]
    assert (found.count, found.nan, found.inf) == (4, 1, 1)
    assert (found.min, found.max, found.mean) == (None, None, 2 + 0.5j)
    assert math.isclose(found.std, values[:2].std())
    assert math.isclose(found.norm, np.linalg.norm(values[:2]))


def test_what_is_no_number(tmp_path):
    dates = np.array(["2026-01-02", "NaT", "2026-01-01"], "M8[D]")
    tree = {"key": jax.random.split(jax.random.key(0), (2, 3)), "dates": dates}
    found = saved(tmp_path / "c", tree)
    assert found["key"] == eqx_ckpt.inspect.LeafStats(6)
    first, last = np.datetime64("2026-01-01"), np.datetime64("2026-01-02")
    assert found["dates"] == eqx_ckpt.inspect.LeafStats(3, nan=1, min=first, max=last)


def test_python_scalars(tmp_path):
    tree = {"i": 3, "f": -0.5, "b": True, "big": 10**30, "nan": math.nan, "c": 3 + 4j}
    found = saved(tmp_path / "c", tree)
    assert found["i"] == eqx_ckpt.inspect.LeafStats(1, 0, 0, 3, 3, 3.0, 0.0, 3.0)
    assert found["f"].min == -0.5
    assert found["b"].max == 1
    assert found["big"].max == 10**30
    assert found["nan"] == eqx_ckpt.inspect.LeafStats(1, nan=1)
    assert (found["c"].mean, found["c"].norm) == (3 + 4j, 5)


def test_nothing_and_nothing_finite(tmp_path):
    inf = np.full(2, -np.inf)
    tree = {"none": np.zeros((0, 3)), "nan": np.full(4, np.nan), "inf": inf}
    found = saved(tmp_path / "c", tree)
    assert found["none"] == eqx_ckpt.inspect.LeafStats(0)
    assert found["nan"] == eqx_ckpt.inspect.LeafStats(4, nan=4)
    assert found["inf"] == eqx_ckpt.inspect.LeafStats(2, inf=2)


def test_sums_that_overflow(tmp_path):
    found = saved(tmp_path / "c", {"w": np.full(10, 1.5e308)})["w"]
    assert math.isclose(found.mean, 1.5e308)
    assert (found.inf, found.max) == (0, 1.5e308)


@pytest.mark.parametrize(
    "options", [{"compression": "zstd"}, {"layout": "ocdbt"}], ids=str
)
def test_other_layouts(tmp_path, options):
    values = jnp.arange(1000, dtype=jnp.bfloat16)
    found = saved(tmp_path / "c", {"w": values}, **options)["w"]
    assert found.max == float(np.asarray(values).astype(float).max())
    assert found.count == 1000


def test_a_part(tmp_path):
    tree = {"a": {"b": np.ones(2)}, "c": np.ones(2)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    assert list(eqx_ckpt.inspect.stats(tmp_path / "c", prefix="a")) == ["a/b"]
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'d'"):
        eqx_ckpt.inspect.stats(tmp_path / "c", prefix="d")


def test_every_damaged_leaf_is_named(tmp_path):
    tree = {name: np.ones(5) for name in "abcd"}
    eqx_ckpt.tree_serialise_leaves(tmp_path, tree, overwrite=True)
    (tmp_path / "a/c.0").unlink()
    (tmp_path / "c/c.0").write_bytes(b"\1" * 44)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'a'(.|\n)*'c'"):
        eqx_ckpt.inspect.stats(tmp_path)


def test_every_dtype_of_one_byte(tmp_path):
    """All values of each of them, among which NaNs and infinities."""
    names = ["float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e3m4"]
    tree = {
        n: np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, n)) for n in names
    }
    found = saved(tmp_path / "c", tree)
    for name, values in tree.items():
        wide = values.astype(float)
        assert found[name].nan == np.isnan(wide).sum() > 0
        assert found[name].inf == np.isinf(wide).sum()
        assert found[name].max == wide[np.isfinite(wide)].max()
