"""Other formats, and what each keeps of a leaf."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.array_serialization import serialization

import eqx_ckpt
from eqx_ckpt import interop

from .check import Tree
from .leaves import NARROW, WIDE
from .likes import NONE
from .oracle import dtype_of, is_jaxs, key_data, kind_of, NUMBERS, on_host
from .places import to_memory


def plain(leaf: Any) -> Any:
    """An array that is JAX's, if JAX has its dtype."""
    if kind_of(leaf) == "key":
        leaf = jax.random.key_data(leaf)
    dtype = dtype_of(leaf).newbyteorder("=")
    array = np.asarray(leaf).astype(dtype)
    is_plain = is_jaxs(dtype) and dtype.name not in (*WIDE, "int1")
    return jnp.asarray(array) if is_plain else array


def on_one_device(keys: jax.Array) -> jax.Array:
    data = jnp.asarray(on_host(key_data(keys)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))


def of_its_kind(leaf: Any) -> Any:
    """What loses its weak type and its sharding, and is no subclass."""
    kind = kind_of(leaf)
    if kind in NUMBERS:
        return kind(leaf)
    return plain(leaf) if kind == "jax" else leaf


def of_orbax(leaf: Any) -> Any:
    if kind_of(leaf) in ("numpy", "scalar"):
        return np.asarray(leaf, dtype_of(leaf).newbyteorder("="))
    return on_one_device(leaf) if kind_of(leaf) == "key" else of_its_kind(leaf)


def of_flax(leaf: Any) -> Any:
    if kind_of(leaf) == "scalar":
        return leaf
    return kind_of(leaf)(leaf) if kind_of(leaf) in NUMBERS else plain(leaf)


COMMON = set(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64".split()
)
OF_NUMPY = COMMON | {"complex128", "datetime64[ns]", "timedelta64[D]"}


class Format(NamedTuple):
    """`write(checkpoint, path)`, `open(path)`, its dtypes, and what it keeps."""

    write: Callable[..., Any]
    open: Callable[..., Any]
    dtypes: set[str]
    keeps: Callable[[Any], Any]
    takes_like: bool = False

    def seen(self, leaf: Any) -> Any:
        most = 2**64 if self.write in (interop.to_eqx, interop.to_flax) else 2**63
        if kind_of(leaf) is int and not -(2**63) <= leaf < most:
            return NONE
        if 0 in np.shape(leaf) and self.write is interop.to_orbax:
            return NONE
        if self.takes_like and kind_of(leaf) == "jax" and dtype_of(leaf).name in WIDE:
            return NONE
        if kind_of(leaf) == "key":
            return NONE if self.takes_like else self.keeps(leaf)
        name = dtype_of(leaf).newbyteorder("=").name
        return self.keeps(leaf) if name in self.dtypes else NONE

    def put(self, tree: Tree, at: Path) -> Any:
        place = to_memory(tree)
        like = (tree,) if self.takes_like else ()
        return self.open(self.write(place, at / "file", *like), *like)


def of_levanter(leaf: Any) -> Any:
    """JAX's serialization takes arrays of JAX."""
    if kind_of(leaf) != "jax" or not np.size(leaf):
        return NONE
    with jax.enable_x64(True):
        return jnp.asarray(plain(leaf))


def to_levanter(tree: Tree, at: Path) -> Any:
    """Arrays in a database, under their names, as Levanter writes them."""
    base = {"driver": "file", "path": str(at / "levanter")}
    specs = [
        {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": base, "path": f"part/{name}"},
        }
        for name in tree["part"]
    ]
    manager = serialization.GlobalAsyncCheckpointManager()
    arrays = [*tree["part"].values()]
    manager.serialize(arrays, specs, on_commit_callback=lambda: None)
    manager.wait_until_finished()
    return interop.open_jax_arrays(at / "levanter")


def of_samples(leaf: Any) -> Any:
    """Eight samples, of which each is a row."""
    if kind_of(leaf) not in ("jax", "key", "numpy") or np.shape(leaf)[:1] != (8,):
        return NONE
    return on_one_device(leaf) if kind_of(leaf) == "key" else plain(leaf)


def to_samples(tree: Tree, at: Path) -> Any:
    tree = {"part": {name: of_samples(leaf) for name, leaf in tree["part"].items()}}
    like = jax.tree.map(lambda x: x[0], tree)
    with eqx_ckpt.recording.Recording(at / "samples", like) as r:
        r.extend(tree)
        r.commit({})
    return eqx_ckpt.recording.Samples(at / "samples").source


FORMATS: Mapping[str, Format] = {
    "safetensors": Format(
        interop.to_safetensors,
        interop.open_safetensors,
        COMMON | {"bfloat16", "float8_e4m3fn", "float8_e5m2"},
        plain,
    ),
    "npz": Format(interop.to_npz, interop.open_npz, OF_NUMPY, plain),
    "flax": Format(interop.to_flax, interop.open_flax, {*NARROW, *WIDE}, of_flax),
    "eqx": Format(
        interop.to_eqx, interop.open_eqx, OF_NUMPY, of_its_kind, takes_like=True
    ),
    "orbax": Format(
        interop.to_orbax,
        interop.open_orbax,
        {"bool", "bfloat16", "float32", "int32", "int64", "uint8", "float64"},
        of_orbax,
    ),
}


class Written(NamedTuple):
    """As a `Format`: `put(tree, at)`, and what is there then of a leaf."""

    put: Callable[[Tree, Path], Any]
    seen: Callable[[Any], Any]


SOURCES: Mapping[str, Format | Written] = {
    **FORMATS,
    "levanter": Written(to_levanter, of_levanter),
    "samples": Written(to_samples, of_samples),
}
