"""What transforms compute: it is what JAX makes outside of them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .check import Call, Tree
from .likes import NONE
from .oracle import is_jaxs, key_data, kind_of, narrow, NUMBERS, on_host, outcome
from .ways import call


OPERATIONS: Mapping[str, Callable[[Any], Any]] = {
    "sliced": lambda x: x[2:6],
    # Not a row with a -0.0, of which XLA may make 0.0 on a mesh.
    "taken": lambda x: x[3],
    "reversed": lambda x: jnp.flip(x, 0),
    "stacked": lambda x: jnp.stack([x, x]),
    "concatenated": lambda x: jnp.concatenate([x, x]),
    "reshaped": lambda x: jnp.reshape(x, (-1,)),
    "cast": lambda x: x.astype(jnp.float16),
    "negated": lambda x: -x,
    "compared": lambda x: x == x,
    "weakened": lambda x: x.sum() * 0 + 1.5,
}
# They are read as they are, of any dtype.
READ = ("sliced", "taken")
NO_KEYS = ("cast", "negated", "compared", "weakened")
# XLA computes with these as exactly as it does one operation at a time.
DTYPES = (
    "float32 float64 bfloat16 complex64 complex128 int8 int16 int32 int64 uint8 uint16 "
    "uint32 uint64"
).split()
MOVED = ("bool", "int4", "float8_e5m2", "float16")
# They need an axis, or more elements than there may be.
NOT_OF_0_D = ("sliced", "taken", "reversed", "concatenated")
OF_NUMBERS = ("negated", "compared")


def made_by(operation: str, leaf: Any) -> Any:
    """What it makes of a leaf outside of a transform; `NONE`: nothing to try.

    `None`: JAX does not have its dtype.
    """
    kind = kind_of(leaf)
    if kind in NUMBERS:
        return OPERATIONS[operation](leaf) if operation in OF_NUMBERS else NONE
    if np.ndim(leaf) == 0 and operation in NOT_OF_0_D:
        return NONE
    if operation == "taken" and len(leaf) < 4:
        return NONE
    if np.size(leaf) == 0 and operation in ("taken", "reversed", "weakened"):
        return NONE
    moves = operation in ("sliced", "taken", "stacked", "concatenated", "reshaped")
    if kind == "key":
        if operation in NO_KEYS:
            return NONE
        data = jnp.asarray(on_host(key_data(leaf)))
        impl = jax.random.key_impl(leaf)
        made = OPERATIONS[operation](jax.random.wrap_key_data(data, impl=impl))
        return NONE if made.shape == leaf.shape and moves else made
    if operation in READ and isinstance(leaf, np.ndarray):
        made = OPERATIONS[operation](leaf)
        return NONE if made.shape == leaf.shape else np.asarray(made)
    if is_jaxs(leaf.dtype) and leaf.dtype.name not in (*DTYPES, *MOVED):
        return NONE  # XLA cannot compile it, or ends the process.
    if not is_jaxs(leaf.dtype) or narrow(leaf.dtype) != leaf.dtype:
        return None
    if leaf.dtype.name not in DTYPES and not moves:
        return NONE
    if leaf.dtype.kind == "c" and operation == "cast":
        return NONE
    made = OPERATIONS[operation](at_home(leaf))
    # JAX returns an array as it is where a slice or a shape takes nothing away.
    return NONE if moves and made.shape == leaf.shape else made


def at_home(leaf: Any) -> jax.Array:
    """The same array on one device."""
    data = on_host(leaf)
    if isinstance(leaf, jax.Array) and leaf.weak_type:
        return jnp.full(leaf.shape, data.flat[0].item() if data.size else 0.0)
    return jnp.asarray(data)


def results(operation: str, tree: Tree) -> tuple[Tree, list[str]]:
    """What it makes of each leaf, and the names of those that JAX lacks."""
    made = {name: made_by(operation, leaf) for name, leaf in tree.items()}
    lacked = [name for name, leaf in made.items() if leaf is None]
    return {n: x for n, x in made.items() if x is not None and x is not NONE}, lacked


def through(operation: str) -> Call:
    def transform(old: Any, names: list[str]) -> Any:
        return {"part": {n: OPERATIONS[operation](old["part"][n]) for n in names}}

    way = call(
        lambda like: {
            "like": {"part": like},
            "transform": lambda old: transform(old, [*like]),
            "unexpected": "ignore",
        }
    )
    says = says_renamed if operation in READ else says_computed
    return way._replace(outcome=computed_outcome, says=says)


def computed_outcome(made: Any, like: Any, casting: str = "no", to: Any = None) -> Any:
    """On a mesh without a PartitionSpec, XLA chooses one."""
    value = outcome(made, like, casting, to)
    if isinstance(value, str) or not isinstance(to, Mesh):
        return value
    # Python has computed with a number before.
    is_free = value.kind in ("jax", "key") and kind_of(made) not in NUMBERS
    return value._replace(where=to) if is_free else value


def says_renamed(status: str, made: Any) -> str:
    return "renamed" if status == "same" else status


def says_computed(status: str, made: Any) -> str:
    """Python computes with numbers, so nothing is said of where they were."""
    is_read = status == "same" and kind_of(made) not in NUMBERS
    return "computed" if is_read else status
