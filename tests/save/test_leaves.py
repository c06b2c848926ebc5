"""Every kind of leaf comes back as it was, or is refused by name."""

import enum
import functools
import math
import struct

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

import eqx_ckpt
from helpers import assert_same, bits, structs


PATH = "memory://leaves"
FLOAT8 = "e3m4 e4m3 e4m3b11fnuz e4m3fn e4m3fnuz e5m2 e5m2fnuz e8m0fnu".split()
JAX_DTYPES = [
    *"bool int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 float32".split(),
    *"complex64 int2 int4 uint2 uint4 float4_e2m1fn".split(),
    *(f"float8_{suffix}" for suffix in FLOAT8),
]
WIDE_DTYPES = ["int64", "uint64", "float64", "complex128"]


def roundtrip(tree, like=None):
    eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)
    return eqx_ckpt.tree_deserialise_leaves(PATH, tree if like is None else like)


def every_pattern(dtype: np.dtype) -> np.ndarray:
    """All bit patterns of small dtypes, and many of the others."""
    raw = np.arange(256, dtype=np.uint8)
    if dtype.name in ("int2", "uint2", "int4", "uint4"):
        return raw[:16].astype(dtype)
    if dtype.name == "float4_e2m1fn":
        return raw[:16].view(dtype)
    if dtype == np.bool_:
        return raw[:2].view(dtype)
    return np.tile(np.random.default_rng(0).permutation(raw), 16).view(dtype)


@pytest.mark.parametrize("dtype", JAX_DTYPES)
@pytest.mark.parametrize("shape", [(-1,), (2, -1), (1, 1, -1)])
def test_jax_arrays(dtype, shape, tmp_path):
    array = jnp.asarray(every_pattern(jnp.dtype(dtype)).reshape(shape))
    assert array.dtype == dtype
    tree = {"array": array, "scalar": array.reshape(-1)[1], "empty": array[..., :0]}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    for like in (tree, structs(tree), eqx_ckpt.tree_like(tmp_path / "new")):
        restored = eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", like)
        assert_same(restored, tree)
    eqx_ckpt.inspect.verify(tmp_path / "new")


@pytest.mark.parametrize("dtype", [*JAX_DTYPES, *WIDE_DTYPES])
@pytest.mark.parametrize("x64", [False, True])
def test_numpy_arrays_and_scalars(dtype, x64):
    array = every_pattern(np.dtype(dtype))
    tree = {"array": array, "0-d": array[1:2].reshape(()), "scalar": array[1]}
    with jax.enable_x64(x64):
        assert_same(roundtrip(tree), tree)
        assert_same(roundtrip(tree, structs(tree)), tree)
        like = eqx_ckpt.tree_like(PATH)
        assert_same(eqx_ckpt.tree_deserialise_leaves(PATH, like), tree)


@pytest.mark.parametrize("dtype", WIDE_DTYPES)
def test_wide_jax_arrays(dtype):
    with jax.enable_x64(True):
        tree = {"w": jnp.asarray(every_pattern(np.dtype(dtype)))}
        assert_same(roundtrip(tree), tree)
        like = structs(tree)
    narrow = structs(jnp.asarray(np.zeros(tree["w"].shape, dtype)))
    for skeleton in (like, {"w": narrow}, tree):
        with pytest.raises(eqx_ckpt.LeafMismatchError, match="enable_x64"):
            eqx_ckpt.tree_deserialise_leaves(PATH, skeleton)


def test_a_narrowed_skeleton_does_not_narrow_the_data():
    tree = {"w": np.array([1 + 1e-12]), "n": np.int64(2**40), "z": np.arange(3) + 2**40}
    skeleton = structs(tree)
    assert skeleton["w"].dtype == "float32"
    assert_same(roundtrip(tree, skeleton), tree)


@pytest.mark.parametrize(
    "dtype", [">f4", ">i8", ">c16", ">u2", "M8[ns]", "m8[D]", ">M8[s]"]
)
def test_dtypes_of_numpy_only(dtype):
    array = np.arange(6).astype(dtype).reshape(2, 3)
    assert_same(roundtrip(array), array)
    assert eqx_ckpt.inspect.read_manifest(PATH).leaves["@root"].dtype == array.dtype.str


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24.0).reshape(2, 3, 4).T,
        np.arange(24.0)[::-2],
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.broadcast_to(np.float32(3), (4, 5)),
        np.zeros((0, 3, 0)),
        np.array(2.5),
        np.array(["a", "b"]) == "a",
    ],
)
def test_numpy_layouts(array):
    restored = roundtrip({"w": array})["w"]
    assert_same(restored, np.array(array))
    restored[...] = 0  # It is the caller's own.


def test_foreign_bools():
    """Bytes other than 0 and 1 in a bool array, which some C libraries make."""
    array = np.array([0, 1, 2, 255], np.uint8).view(bool)
    assert_same(roundtrip(array), np.array([False, True, True, True]))


INTEGERS = [0, -1, 2**63, 10**40, -(10**40)]
FLOATS = [0.0, -0.0, 0.1, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308]


@pytest.mark.parametrize(
    "scalar", [True, False, *INTEGERS, *FLOATS, *(complex(x, -x) for x in FLOATS)]
)
def test_python_scalars(scalar):
    assert bits(roundtrip({"x": scalar})["x"]) == bits(scalar)
    restored = eqx_ckpt.tree_deserialise_leaves(PATH, eqx_ckpt.tree_like(PATH))
    assert bits(restored["x"]) == bits(scalar)


@given(st.one_of(st.integers(), st.floats(), st.complex_numbers(), st.booleans()))
@settings(max_examples=100)
def test_any_python_scalar(scalar):
    assert bits(roundtrip([scalar])[0]) == bits(scalar)


def test_an_integer_of_more_digits_than_python_prints():
    assert roundtrip({"x": -(10**5000)}) == {"x": -(10**5000)}


def test_a_nan_keeps_its_payload():
    payload = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    restored = roundtrip({"x": payload})["x"]
    assert struct.pack(">d", restored) == struct.pack(">d", payload)


def test_a_subclass_of_int():
    class Stage(enum.IntEnum):
        WARMUP = 1
        COOLDOWN = 2

    assert roundtrip([Stage.COOLDOWN], [Stage.WARMUP]) == [Stage.COOLDOWN]
    assert type(roundtrip([Stage.COOLDOWN], [0])[0]) is int


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys(impl):
    key = jax.random.key(7, impl=impl)
    tree = {"one": key, "batch": jax.random.split(key, (2, 3)), "none": key[None][:0]}
    for like in (tree, structs(tree)):
        assert_same(roundtrip(tree, like), tree)
    like = eqx_ckpt.tree_like(PATH)
    assert_same(eqx_ckpt.tree_deserialise_leaves(PATH, like), tree)


def test_a_key_of_another_impl():
    eqx_ckpt.tree_serialise_leaves(PATH, {"key": jax.random.key(0)}, overwrite=True)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'rbg'.*'threefry2x32'"):
        eqx_ckpt.tree_deserialise_leaves(PATH, {"key": jax.random.key(0, impl="rbg")})


WEAK = [jnp.asarray(1.5), jnp.asarray(3), jnp.asarray(1j), jnp.full((2, 2), 1.0)]


@pytest.mark.parametrize("array", [*WEAK, jnp.ones(2), jnp.int8(1)])
def test_weak_types(array):
    roundtrip({"x": array})
    assert eqx_ckpt.tree_like(PATH)["x"].weak_type == array.weak_type
    for like in (array, structs(array)):
        restored = roundtrip(array, like)
        assert restored.weak_type == array.weak_type
        assert_same(restored, array)


@pytest.mark.parametrize("value", [math.nan, math.inf, complex(0, math.nan)])
@pytest.mark.parametrize("check", [jax.debug_nans, jax.debug_infs])
def test_weak_types_while_jax_looks_for_nans(value, check):
    """What was saved is not what a computation has come to."""
    array = jnp.asarray(value)
    assert array.weak_type
    for like in (array, structs(array)):
        with check(True):
            restored = roundtrip(array, like)
        assert_same(restored, array)


def test_weak_types_inside_jit():
    like = {"weak": jnp.asarray(2.0), "strong": jnp.ones(3)}
    eqx_ckpt.tree_serialise_leaves(PATH, like, overwrite=True)
    for skeleton in (like, structs(like)):
        restore = functools.partial(eqx_ckpt.tree_deserialise_leaves, PATH, skeleton)
        assert_same(jax.jit(restore)(), like)


def test_weak_types_under_x64():
    with jax.enable_x64(True):
        array = jnp.asarray(1.5)
        assert array.weak_type
        assert array.dtype == "float64"
        assert_same(roundtrip(array), array)


def test_promotion_and_compilation_are_those_of_a_tree_that_was_never_saved():
    tree = {"scale": jnp.asarray(0.5), "w": jnp.ones(3, jnp.bfloat16)}
    step = jax.jit(lambda t: t["scale"] * t["w"])
    expected = step(tree)
    assert step(roundtrip(tree, structs(tree))).dtype == expected.dtype == jnp.bfloat16
    assert step._cache_size() == 1


def test_committed_or_not_as_in_like():
    free, fixed = jnp.ones(3), jax.device_put(jnp.ones(3), jax.devices()[3])
    eqx_ckpt.tree_serialise_leaves(PATH, {"x": fixed}, overwrite=True)
    assert not eqx_ckpt.tree_deserialise_leaves(PATH, {"x": free})["x"].committed
    assert not eqx_ckpt.tree_deserialise_leaves(PATH, structs({"x": free}))[
        "x"
    ].committed
    restored = eqx_ckpt.tree_deserialise_leaves(PATH, {"x": fixed})["x"]
    assert restored.committed
    assert restored.devices() == {jax.devices()[3]}


def test_a_deleted_array_is_still_a_like():
    """After a donating step the old state is no more than a skeleton: enough."""
    tree = {"x": jnp.arange(3), "k": jax.random.key(0)}
    eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)
    like = jtu.tree_map(lambda x: x, {"x": jnp.zeros(3, int), "k": jax.random.key(1)})
    like["x"].delete()
    assert_same(eqx_ckpt.tree_deserialise_leaves(PATH, like), tree)


def test_shared_layers():
    class Tied(eqx.Module):
        shared: eqx.nn.Shared

        def __init__(self, key):
            embedding = eqx.nn.Embedding(3, 4, key=key)
            linear = eqx.nn.Linear(4, 3, use_bias=False, key=key)
            self.shared = eqx.nn.Shared(
                (embedding, linear),
                lambda pair: pair[1].weight,
                lambda pair: pair[0].weight,
            )

    model = Tied(jax.random.key(0))
    like = eqx.filter_eval_shape(Tied, jax.random.key(0))
    restored = roundtrip(model, like)
    assert len(eqx_ckpt.inspect.read_manifest(PATH).leaves) == 1
    embedding, linear = restored.shared()
    assert linear.weight is embedding.weight
    assert bits(embedding.weight) == bits(model.shared()[0].weight)


@pytest.mark.parametrize(
    "optimiser",
    [
        optax.adamw(1e-3),
        optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)),
        optax.inject_hyperparams(optax.adam)(1e-3),
        optax.MultiSteps(optax.lion(1e-3), 2),
    ],
)
def test_optimiser_states(optimiser, getkey):
    model = eqx.nn.MLP(2, 2, 4, 2, key=getkey())

    def init(model):
        return optimiser.init(eqx.filter(model, eqx.is_array))

    like = eqx.filter_eval_shape(init, model)
    assert_same(roundtrip(init(model), like), init(model))


@pytest.mark.parametrize(
    "tree", [{}, [], None, {"f": jax.nn.relu, "n": None}, jnp.ones(3)]
)
def test_trees_with_next_to_nothing(tree, tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", tree), tree)
    eqx_ckpt.inspect.verify(tmp_path / "new")


def deleted():
    array = jnp.ones(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (np.array([None, 1]), "dtype `object`"),
        (np.array(["text"]), "dtype `<U4`"),
        (np.zeros(2, [("a", "i4")]), "dtype"),
        (np.longdouble(1), "dtype"),
        (np.ma.array([1, 2], mask=[0, 1]), "MaskedArray"),
        (deleted(), "was deleted"),
        (jax.ShapeDtypeStruct((3,), "float32"), "no data"),
        (jax.new_ref(jnp.ones(3)), "`jax.Ref`"),
        (np.zeros(3, jax.dtypes.float0), "dtype"),
    ],
)
def test_leaves_that_cannot_be_saved(leaf, reason, tmp_path):
    tree = {"good": jnp.ones(2), "bad": [leaf], "worse": np.array(["x"])}
    with pytest.raises(eqx_ckpt.CheckpointError, match="(?s)'bad/0'.*'worse'") as error:
        eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    assert reason in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_saving_and_restoring_inside_jit(tmp_path):
    @jax.jit
    def save(x):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "new", {"x": x})

    with pytest.raises(eqx_ckpt.CheckpointError, match="outside `jax.jit`"):
        save(jnp.ones(3))
    assert list(tmp_path.iterdir()) == []
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", {"x": jnp.ones(3)})
    restore = jax.jit(
        lambda x: eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", {"x": x})
    )
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="outside `jax.jit`"):
        restore(jnp.ones(3))


def test_is_leaf_does_not_hide_arrays(getkey):
    model = [eqx.nn.Linear(2, 2, key=getkey())]
    with pytest.raises(eqx_ckpt.CheckpointError, match="'0'.*`is_leaf` made a leaf"):
        eqx_ckpt.tree_serialise_leaves(
            "memory://linear", model, is_leaf=lambda x: isinstance(x, eqx.nn.Linear)
        )


shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
arrays = st.sampled_from([*JAX_DTYPES, *WIDE_DTYPES]).flatmap(
    lambda dtype: shapes.map(lambda shape: (np.dtype(dtype), shape))
)
scalars = st.one_of(st.booleans(), st.integers(), st.floats(), st.complex_numbers())


@st.composite
def leaves(draw):
    if draw(st.booleans()):
        return draw(scalars)
    dtype, shape = draw(arrays)
    size = math.prod(shape)
    array = np.resize(every_pattern(dtype), size).reshape(shape)
    wide = dtype.name in WIDE_DTYPES
    return array if wide or draw(st.booleans()) else jnp.asarray(array)


@given(
    st.recursive(
        leaves(),
        lambda inner: st.one_of(
            st.dictionaries(st.text("abcxyz", min_size=1), inner, max_size=3),
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=8,
    )
)
@settings(max_examples=60)
def test_any_tree_comes_back(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("any") / "new"
    eqx_ckpt.tree_serialise_leaves(path, tree)
    for like in (tree, structs(tree)):
        assert_same(eqx_ckpt.tree_deserialise_leaves(path, like), tree)
    eqx_ckpt.inspect.verify(path)


@pytest.mark.parametrize("dtype", [ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn])
def test_six_bit_floats(dtype, tmp_path):
    array = np.arange(4).astype(dtype)
    assert_same(roundtrip({"x": array}), {"x": array})
    try:
        on_device = jax.device_put(array)
    except (TypeError, RuntimeError):
        pytest.skip("This JAX has no arrays of six-bit floats.")
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", {"x": on_device})
    eqx_ckpt.inspect.verify(tmp_path / "new")
    for like in (on_device, array, jax.ShapeDtypeStruct((4,), dtype)):
        found = eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", {"x": like})
        assert_same(found, {"x": array if like is array else on_device})


class Raising:
    def __getattr__(self, name):
        if name in ("__qualname__", "__module__"):
            raise RuntimeError(name)
        raise AttributeError(name)


@pytest.mark.parametrize(
    "leaf",
    [
        np.ndarray.ravel,
        str.upper,
        "text".upper,
        dict.get,
        dict.fromkeys,
        (1.0).__add__,
        int.__add__,
        len,
        functools.partial(str.upper),
        Raising(),
    ],
)
def test_any_object_is_left_out(leaf):
    tree = {"f": leaf, "n": 1}
    eqx_ckpt.tree_serialise_leaves("memory://objects", tree, overwrite=True)
    restored = eqx_ckpt.tree_deserialise_leaves("memory://objects", tree)
    assert restored["f"] is leaf
    assert eqx_ckpt.tree_match("memory://objects", tree).ok
    text = eqx_ckpt.inspect.read_manifest("memory://objects").unsaved["f"]
    assert "None" not in text
    assert "0x" not in text
