"""A fingerprint of an array, computed on its device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._format.leaf_record import LeafRecord
from .._storage.calls.threads import is_ending, Pool
from .._tree.leaves.leaf_data import parts


# For each of the four sums, by what a position and a word are multiplied.
_ROUNDS = (
    (0x9E3779B1, 0x85EBCA77),
    (0xC2B2AE3D, 0x27D4EB2F),
    (0x165667B1, 0xD3A2646D),
    (0xFD7046C5, 0xB55A4F09),
)


# Between the words of an element, and between positions 2**32 elements apart.
_NEXT_WORD, _NEXT_BLOCK = 0x632BE5AB, 0x5BD1E995


_WORDS = (2, 4, 8, 16, 32, 64)


# The 128 bits of each part of an array that this process has, by the part's region.
Fingerprint = dict[str, tuple[int, ...]]


def has_fingerprint(leaf: jax.Array) -> bool:
    """Whether `fingerprints` takes an array: it is in the memory of its device."""
    device = next(iter(leaf.sharding.device_set))
    if leaf.sharding.memory_kind not in (None, device.default_memory().kind):
        return False
    is_small = max(leaf.shape, default=0) < 2**32
    return is_small and (
        jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or _bits(leaf.dtype) in _WORDS
    )


def fingerprints(arrays: dict[str, tuple[Any, LeafRecord]]) -> dict[str, Fingerprint]:
    """The fingerprints of arrays that have one; 16 bytes of each part are transferred.

    None, if no thread can be started any more: the caller's may have a mesh, or be
    tracing, in which no program for one device can run.
    """
    if not arrays or is_ending():
        return {}
    on_devices = {
        name: {repr(region): data for region, data in parts(leaf, record)}
        for name, (leaf, record) in arrays.items()
    }
    with Pool(1) as pool:
        found = pool.submit(_computed, on_devices).result()
    return {
        name: {region: tuple(sums.tolist()) for region, sums in of_parts.items()}
        for name, of_parts in found.items()
    }


def _computed(data: Any) -> Any:
    # Arrays may be wider than those of now.
    with jax.enable_x64(True):
        return jax.device_get(jax.tree.map(_fingerprint, data))


@jax.jit
def _fingerprint(array: jax.Array) -> jax.Array:
    """Four sums over all words, each mixed with its position.

    Each mixing is a permutation of the words, so one word that differs changes the
    first sum.
    """
    low, high = _positions(array.shape)
    total = jnp.zeros(len(_ROUNDS), np.uint32)
    for i, word in enumerate(_words(array)):
        state = word + np.uint32(i * _NEXT_WORD % 2**32)
        if high is not None:
            state = state + high * np.uint32(_NEXT_BLOCK)
        sums: list[jax.Array] = []
        for of_position, of_word in _ROUNDS:
            state = state ^ (low * np.uint32(of_position))
            state = (state ^ (state >> np.uint32(15))) * np.uint32(of_word)
            state = state ^ (state >> np.uint32(13))
            sums.append(jnp.sum(state, dtype=np.uint32))
        total = total + jnp.stack(sums)
    return total


def _positions(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None]:
    """The position of each element in C order, as two words; the second if needed."""
    low, high = jnp.zeros(shape, np.uint32), None
    inside, blocks = 1, 1
    for axis in reversed(range(len(shape))):
        index = lax.broadcasted_iota(np.uint32, shape, axis)
        if inside * shape[axis] <= 2**32 and high is None:
            low = low + index * np.uint32(inside % 2**32)
            inside *= shape[axis]
        else:
            index = index * np.uint32(blocks % 2**32)
            high = index if high is None else high + index
            blocks *= shape[axis]
    return low, high


def _words(array: jax.Array) -> list[jax.Array]:
    """The bits of each element, as one to four words."""
    if jnp.issubdtype(array.dtype, np.complexfloating):
        return [*_words(lax.real(array)), *_words(lax.imag(array))]
    if array.dtype == np.bool_:
        return [array.astype(np.uint32)]
    bits = _bits(array.dtype)
    if bits == 64:
        both = lax.bitcast_convert_type(array, np.uint32)
        return [both[..., 0], both[..., 1]]
    return [lax.bitcast_convert_type(array, f"uint{bits}").astype(np.uint32)]


def _bits(dtype: Any) -> int:
    """The bits of an element; of each of its parts, if it is complex."""
    if dtype == np.bool_:
        return 8
    kinds = jnp.iinfo if jnp.issubdtype(dtype, np.integer) else jnp.finfo
    return int(kinds(dtype).bits)
