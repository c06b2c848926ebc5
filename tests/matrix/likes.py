"""What `like` may have for a leaf that was saved."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, Sharding

from .leaves import mesh, Metres, on, Phase, rows
from .oracle import Computed, dtype_of, kind_of, LACKED, narrow, NUMBERS


# In place of a `like` that cannot be made for a leaf.
NONE = object()


def same(saved: Any) -> Any:
    """A leaf of the same kind, with other values."""
    kind = kind_of(saved)
    if kind in NUMBERS:
        return Phase.WARM_UP if type(saved) is Phase else type(saved)(0)
    if kind == "numpy":
        return np.zeros_like(saved)
    if kind == "scalar":
        return np.zeros((), saved.dtype)[()]
    where = saved.sharding if saved.committed else None
    if kind == "key":
        key = jax.random.key(0, impl=jax.random.key_impl(saved))
        key = jnp.broadcast_to(key, saved.shape)
        return key if where is None else on(key, where)
    return on(np.zeros(saved.shape, saved.dtype), where)


def array(saved: Any, where: Any = None) -> Any:
    """A JAX array of the same shape, and of the dtype that JAX has for it."""
    dtype = np.dtype("uint32") if kind_of(saved) == "key" else narrow(dtype_of(saved))
    if dtype.kind in "mM" or dtype.name in LACKED:
        return NONE
    return on(np.zeros(np.shape(saved), dtype.newbyteorder("=")), where)


def weak(saved: Any) -> Any:
    like = array(saved)
    zeros = {x.dtype: x for x in map(jnp.asarray, (0, 0.0, 0j))}
    if like is NONE or like.dtype not in zeros:
        return NONE
    return jnp.broadcast_to(zeros[like.dtype], like.shape)


def of_numpy(saved: Any) -> np.ndarray:
    dtype = np.dtype("uint32") if kind_of(saved) == "key" else dtype_of(saved)
    return np.zeros(np.shape(saved), dtype)


def swapped(array: np.ndarray) -> Any:
    order = array.dtype.newbyteorder()
    return np.zeros(array.shape, order) if order != array.dtype else NONE


def scalar(saved: Any) -> Any:
    return np.zeros((), of_numpy(saved).dtype)[()]


def struct(saved: Any, sharding: Sharding | None = None) -> Any:
    return jax.ShapeDtypeStruct(np.shape(saved), dtype_of(saved), sharding=sharding)


def evaluated(saved: Any) -> Any:
    """What `eqx.filter_eval_shape` shows of it, which may be narrower."""
    try:
        with np.errstate(all="ignore"):
            return eqx.filter_eval_shape(lambda: saved)
    except (TypeError, ValueError):  # JAX lacks the dtype.
        return NONE


def traced(like: Any) -> Any:
    """What a function is known to return before it is computed.

    JAX does not say yet on which devices an array will be, unless its mesh does.
    """
    if not isinstance(like, jax.Array) or like.is_deleted() or not like.committed:
        return like
    struct = evaluated(like)
    if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return struct
    if struct.sharding is not None:
        return Computed(struct.shape, struct.dtype, sharding=struct.sharding)
    with jax.enable_x64(True):
        return on(np.zeros(struct.shape, struct.dtype), None)


def in_rows(make: Callable[[Any, Any], Any], saved: Any, axes: AxisType) -> Any:
    """A leaf that is split over all devices, if it can be."""
    rank = np.ndim(saved)
    is_split = rank and (make is struct or np.shape(saved)[0] % 8 == 0)
    return make(saved, rows(axes)) if is_split else NONE


def everywhere(axes: AxisType) -> NamedSharding:
    return NamedSharding(mesh(axes), P())


def donated(saved: Any) -> Any:
    like = array(saved)
    if like is not NONE:
        like.delete()
    return like


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
LIKES: Mapping[str, Callable[[Any], Any]] = {
    "itself": lambda saved: saved,
    "same": same,
    "jax": array,
    "jax committed": lambda saved: array(saved, jax.devices()[5]),
    "jax in rows": lambda saved: in_rows(array, saved, AUTO),
    "jax explicit": lambda saved: array(saved, everywhere(EXPLICIT)),
    "jax weak": weak,
    "jax donated": donated,
    "numpy": of_numpy,
    "numpy swapped": lambda saved: swapped(of_numpy(saved)),
    "scalar": scalar,
    "mapped": lambda saved: of_numpy(saved).view(np.memmap),
    "struct": struct,
    "struct committed": lambda saved: struct(
        saved, jax.sharding.SingleDeviceSharding(jax.devices()[5])
    ),
    "struct everywhere": lambda saved: struct(saved, everywhere(AUTO)),
    "struct in rows": lambda saved: in_rows(struct, saved, AUTO),
    "struct explicit": lambda saved: in_rows(struct, saved, EXPLICIT),
    "struct larger": lambda saved: jax.ShapeDtypeStruct(
        (*np.shape(saved), 2), dtype_of(saved)
    ),
    "evaluated": evaluated,
    "struct narrower": lambda saved: jax.ShapeDtypeStruct(
        np.shape(saved), narrow(dtype_of(saved))
    ),
    "bool": lambda saved: False,
    "int": lambda saved: 0,
    "float": lambda saved: 0.0,
    "complex": lambda saved: 0j,
    "phase": lambda saved: Phase.WARM_UP,
    "metres": lambda saved: Metres(0),
    "key": lambda saved: jax.random.key(0),
    "key rbg": lambda saved: struct(jax.random.key(0, impl="rbg")),
    "text": lambda saved: "text",
    "function": lambda saved: len,
    # No checkpoint has these.
    "texts": lambda saved: np.zeros(np.shape(saved), "U3"),
    "objects": lambda saved: np.full(np.shape(saved), None),
    "masked": lambda saved: np.ma.array(of_numpy(saved)),
    "long double": lambda saved: np.longdouble(0),
}


def mixed(
    saved: Mapping[str, Any], seed: str, names: Sequence[str] = (*LIKES,)
) -> dict[str, Any]:
    """Some `like` for each leaf, of kinds that are drawn: always the same ones."""
    draw = random.Random(seed)
    found = {leaf: LIKES[draw.choice(names)](value) for leaf, value in saved.items()}
    return {leaf: like for leaf, like in found.items() if like is not NONE}


def made(name: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """What one kind of `like` has for each leaf, if it can have any."""
    found = {leaf: LIKES[name](value) for leaf, value in saved.items()}
    return {leaf: like for leaf, like in found.items() if like is not NONE}
