"""One tree of all that people put into a checkpoint, through every verb."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import eqx_ckpt
from helpers import assert_same, structs


nn = eqx.nn
SMALL = "int2 int4 uint2 uint4 float4_e2m1fn float8_e4m3fn float8_e5m2 float8_e8m0fnu"
LARGE = "bool int8 int16 int32 uint8 uint16 uint32 float16 bfloat16 float32 complex64"
HUGE = "int64 uint64 float64 complex128 >f4 >i8 >c16 >u2 M8[ns] >m8[D]"
KEYS = [
    "",
    "a/b",
    "..",
    "a.b",
    " ",
    "%",
    "@root",
    "con",
    "naïve",
    "线",
    "\n",
    "x" * 300,
]
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _matrices(params):
    return jtu.tree_map(lambda x: x.ndim > 1, params)


OPTIMISERS = {
    "adabelief": optax.adabelief(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "adagrad": optax.adagrad(1e-3),
    "adam": optax.adam(optax.cosine_decay_schedule(1e-3, 100)),
    "adamw": optax.inject_hyperparams(optax.adamw)(1e-3),
    "adan": optax.adan(1e-3),
    "amsgrad": optax.amsgrad(1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
    "finite": optax.apply_if_finite(optax.rmsprop(1e-3, centered=True), 3),
    "lamb": optax.lamb(1e-3),
    "lbfgs": optax.lbfgs(memory_size=2),
    "lion": optax.MultiSteps(optax.lion(1e-3), 2),
    "masked": optax.masked(optax.novograd(1e-3), _matrices),
    "noisy": optax.noisy_sgd(1e-3, key=0),
    "radam": optax.contrib.schedule_free(optax.radam(1e-3), 1e-3),
    "rprop": optax.rprop(1e-3),
    "sm3": optax.named_chain(("sm3", optax.sm3(1e-3)), ("ema", optax.ema(0.9))),
}


def _linear(key):
    return nn.Linear(2, 2, key=key)


class Layers(eqx.Module):
    """The layers of Equinox that have arrays, and some that have none."""

    layers: tuple
    named: dict

    def __init__(self, key):
        conv = {"in_channels": 2, "out_channels": 4, "kernel_size": 3, "key": key}
        linear = nn.Linear(3, 4, key=key)
        self.layers = (
            linear,
            nn.Linear("scalar", 2, use_bias=False, dtype=jnp.bfloat16, key=key),
            *(
                layer(**conv)
                for layer in (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
            ),
            nn.Conv(4, 2, 2, 1, key=key),
            nn.ConvTranspose(1, 2, 2, 1, key=key),
            nn.MultiheadAttention(2, 4, use_query_bias=True, key=key),
            nn.LSTMCell(2, 3, key=key),
            nn.GRUCell(2, 3, use_bias=False, key=key),
            nn.Embedding(5, 3, key=key),
            nn.RotaryPositionalEmbedding(4),
            nn.MLP(2, "scalar", 4, 2, final_activation=jax.nn.softplus, key=key),
            nn.PReLU(0.1),
            nn.Lambda(jax.nn.gelu),
            nn.Identity(),
            nn.AvgPool2d(2),
            nn.AdaptiveMaxPool1d(2),
            nn.WeightNorm(linear),
            nn.Shared((linear, linear), lambda p: p[1].weight, lambda p: p[0].weight),
        )
        self.named = {
            "norms": [nn.LayerNorm((2, 3)), nn.GroupNorm(2, 4), nn.RMSNorm(3)],
            "state": nn.Sequential(
                [
                    nn.BatchNorm(3, "batch", mode="ema"),
                    nn.Dropout(0.25),
                    nn.SpectralNorm(linear, "weight", key=key),
                    nn.BatchNorm(4, "batch", mode="batch", momentum=0.9),
                ]
            ),
            "stacked": eqx.filter_vmap(_linear)(jr.split(key, 3)),
        }


def numbers(dtype: str) -> np.ndarray:
    """Many values of a dtype, with both zeros, NaNs and infinities if it has any."""
    raw = np.random.default_rng(0).permutation(np.arange(256, dtype=np.uint8))
    if dtype in SMALL.split():
        return np.arange(4).astype(dtype).reshape(2, 2)
    array = np.tile(raw % 2 if dtype == "bool" else raw, 16).view(dtype)
    return array.reshape(4, -1)


def model_and_optimisers(key):
    params = eqx.filter(nn.MLP(2, 2, 3, 1, key=key), eqx.is_inexact_array)
    states = {name: opt.init(params) for name, opt in OPTIMISERS.items()}
    return nn.make_with_state(Layers)(key), states


def fill(leaf):
    """An array of random numbers in place of a skeleton: nothing is compiled."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jr.key(7)
    if leaf.weak_type:
        return jnp.full(leaf.shape, leaf.dtype.type(3).item())
    return jnp.asarray(np.random.default_rng(0).uniform(0, 9, leaf.shape), leaf.dtype)


def everything():
    narrow = {dtype: numbers(dtype) for dtype in f"{SMALL} {LARGE}".split()}
    wide = {dtype: numbers(dtype) for dtype in HUGE.split()}
    skeleton = eqx.filter_eval_shape(model_and_optimisers, jr.key(0))
    return {
        "model": jtu.tree_map(fill, skeleton),
        "jax": {k: jnp.asarray(v) for k, v in narrow.items()},
        "numpy": {k: (v, v[:, ::-2], v[:0]) for k, v in {**narrow, **wide}.items()},
        "0-d": {
            k: (v[0, 0], v[:1, :1].reshape(())) for k, v in {**narrow, **wide}.items()
        },
        "empty": [jnp.zeros((0, 3)), np.zeros((2, 0), "int4"), np.zeros((0, 2))],
        "keys": [jr.key(1), jr.split(jr.key(2, impl="rbg"), 3), jr.PRNGKey(3)],
        "weak": [jnp.asarray(0.5), jnp.asarray(1), jnp.asarray(1j)],
        "python": [
            True,
            0,
            -(10**5000),
            -0.0,
            math.inf,
            math.nan,
            5e-324,
            1j * math.inf,
        ],
        "odd": {name: i for i, name in enumerate(KEYS)},
        "ints": {-1: np.float32(1), 0: {7: jnp.ones(2)}, 10**30: ()},
    }


@pytest.fixture(scope="module")
def tree():
    return everything()


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_everything(tree, layout, tmp_path):
    path = tmp_path / "new"
    eqx_ckpt.tree_serialise_leaves(path, tree, layout=layout)
    skeleton = {
        key: value if key in ("numpy", "0-d") else structs(value)
        for key, value in tree.items()
    }
    for like in (tree, skeleton):
        assert eqx_ckpt.tree_match(path, like).problems == {}
        assert_same(eqx_ckpt.tree_deserialise_leaves(path, like), tree)
    eqx_ckpt.inspect.verify(path)
    # The dictionaries of `tree_like` have the names of the modules' leaves.
    copy = eqx_ckpt.tree_deserialise_leaves(path, eqx_ckpt.tree_like(path))
    assert_same(eqx_ckpt.interop.from_state_dict(tree, copy), tree)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "copy", copy, layout=layout)
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "copy", tree), tree)


def test_everything_in_memory(tree):
    assert_same(
        eqx_ckpt.interop.from_state_dict(tree, eqx_ckpt.interop.to_state_dict(tree)),
        tree,
    )
