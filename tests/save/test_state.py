"""State that is not saved is named at the save; constants and functions are not."""

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools as ft
import itertools
import logging
import pathlib
import pickle
import random
import re
import threading
import types
import uuid
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ckpt
from helpers import assert_same


PATH = "memory://state"


def save(tree, *args, **kwargs):
    eqx_ckpt.tree_serialise_leaves(PATH, tree, *args, overwrite=True, **kwargs)


class Plain:
    """No PyTree, though it may look like a model."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__ |= attributes


class Called(Plain):
    def __call__(self, x):
        return x


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@dataclasses.dataclass
class Mutable:
    count: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any = 0


class Hashable(collections.UserDict):
    """A mapping that is no PyTree, and that has a hash as values have."""

    def __hash__(self):
        return hash(frozenset(self.data))


class Colour(enum.Enum):
    RED = 1


RNG = np.random.default_rng(0)
STATE = {
    "bit generator": np.random.PCG64(),
    "bound method": RNG.normal,
    "bytearray": bytearray(3),
    "count": itertools.count(),
    "counter": collections.Counter("abc"),
    "dataclass": Mutable(),
    "decimal": decimal.Decimal("0.1"),
    "deque": collections.deque([1]),
    "fraction": fractions.Fraction(1, 3),
    "frozen with an array": Frozen(np.ones(2)),
    "model": Called(layers=[Plain(weight=jnp.ones(2))]),
    "mapping": types.MappingProxyType({"lr": 0.1}),
    "mapping with a hash": Hashable(lr=0.1),
    "mapping with an array": Hashable(layer=Frozen(jnp.ones(2))),
    "method of a model": Called(weight=jnp.ones(2)).__call__,
    "namespace": argparse.Namespace(lr=0.1),
    "partial": ft.partial(jnp.dot, jnp.ones(2)),
    "plain": Plain(count=0),
    "python random": random.Random(0),
    "random state": np.random.RandomState(0),
    "rng": RNG,
    "set": {1, 2},
    "slots": Slotted(),
}
STATIC = {
    "builtin": len,
    "bytes": b"bytes",
    "class": Plain,
    "compiled": re.compile("a"),
    "date": datetime.date(2020, 1, 1),
    "device": jax.devices()[0],
    "dtype": np.dtype(np.float32),
    "ellipsis": ...,
    "empty": Plain(),
    "empty mapping": types.MappingProxyType({}),
    "enum": Colour.RED,
    "frozen": Frozen(),
    "frozenset": frozenset([1]),
    "function": lambda x: x,
    "gelu": jax.nn.gelu,
    "grad": jax.grad(jnp.sum),
    "jit": jax.jit(lambda x: x),
    "jnp dtype": jnp.float32,
    "jnp ufunc": jnp.add,
    "jnp ufunc's method": jnp.add.reduce,
    "lock": threading.Lock(),
    "logger": logging.getLogger(__name__),
    "lru_cache": ft.lru_cache(len),
    "mesh": jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)),
    "method of an empty one": Called().__call__,
    "module": jnp,
    "partial": ft.partial(jax.nn.leaky_relu, negative_slope=0.2),
    "partition": jax.sharding.PartitionSpec("x"),
    "path": pathlib.PurePath("a"),
    "range": range(3),
    "relu": jax.nn.relu,
    "sentinel": object(),
    "sharding": jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    "slice": slice(0, 3),
    "string": "text",
    "treedef": jax.tree.structure([1]),
    "ufunc": np.add,
    "uuid": uuid.UUID(int=1),
    "vectorized": np.vectorize(len),
}


@pytest.mark.parametrize("name", STATE)
def test_state_is_named(name):
    with pytest.warns(
        UserWarning, match=r"state that is not saved: 'b/x' \(a `\w+`\)\. "
    ):
        save({"a": STATIC, "b": {"x": STATE[name]}, "c": 1})


def test_one_warning_for_all():
    with pytest.warns(UserWarning, match="not saved") as caught:
        save(STATE | {"x": 1})
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "'bytearray' (a `bytearray`), 'count' (a `count`), " in text
    assert f" and {len(STATE) - 10} more." in text
    assert "filter_spec" in text


@pytest.mark.parametrize("name", STATIC)
def test_no_warning_for_what_does_not_change(name):
    save({"x": STATIC[name]})


def test_no_warning_for_models_and_optimisers(getkey):
    optimiser = optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(1, 9))
    model = eqx.nn.MLP(2, 2, 4, 2, activation=ft.partial(jax.nn.elu), key=getkey())
    save(
        {
            "lstm": eqx.nn.LSTMCell(2, 2, key=getkey()),
            "model": model,
            "norm": eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="batch"),
            "optimiser": optimiser,
            "state": optimiser.init(eqx.filter(model, eqx.is_array)),
            "transforms": optax.chain(optax.clip(1.0), optax.adam(1e-3)),
        }
    )


def test_a_spec_ends_the_warning():
    tree = {"rng": RNG, "x": 1}

    def leave_out(f, x):
        if not isinstance(x, np.random.Generator):
            eqx_ckpt.default_serialise_filter_spec(f, x)

    def write(f, x):
        pickle.dump(x, f)

    save(tree, leave_out)
    save(tree, {"rng": write, "x": leave_out})
    with pytest.warns(UserWarning, match="'rng'"):
        save(tree, lambda f, x: eqx_ckpt.default_serialise_filter_spec(f, x))


def test_an_asynchronous_save_warns_at_once(tmp_path):
    with pytest.warns(UserWarning, match="'rng'"):
        saving = eqx_ckpt.tree_serialise_leaves_async(tmp_path / "new", {"rng": RNG})
    saving.result()


def test_the_way_out_of_the_warning():
    tree = {"rng": np.random.default_rng(1).bit_generator.state, "x": 1}
    like = {"rng": np.random.default_rng(2).bit_generator.state, "x": 0}
    save(tree)
    assert_same(eqx_ckpt.tree_deserialise_leaves(PATH, like), tree)
