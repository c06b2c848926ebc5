"""The order of the rows: a pure function of seed, epoch and position.

All of it is integer arithmetic modulo 2**32, so that NumPy and JAX, on every backend
and in every version, compute the same numbers. Each function takes NumPy or JAX arrays
of `uint32` and returns arrays of the same kind.

Sources of the methods:

- the hash is the finaliser `lowbias32`, found by Chris Wellons
  (https://nullprogram.com/blog/2018/07/31/);
- up to 65,536 rows, the swap-or-not shuffle: V. T. Hoang, B. Morris, P. Rogaway, "An
  Enciphering Scheme Based on a Card Shuffle", CRYPTO 2012;
- above, a Feistel network of additions modulo two numbers of about `sqrt(n)`, with
  cycle walking: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite
  Domains", CT-RSA 2002, section 5.
"""

import functools as ft
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


# Part of the settings in every cursor: a change to the numbers below is a new version.
VERSION = 3


_SMALL = 65_536


_FEISTEL_ROUNDS = 8


# For each bit of the number of rows, and at least. Each round of the shuffle leaves at
# most 5/8 of the distance to the uniform distribution over the permutations of two to
# six rows; after 48 rounds, one part in 10^9 is left.
_ROUNDS_PER_BIT, _LEAST_ROUNDS = 6, 48


_GOLDEN = 0x9E3779B9


class Key(NamedTuple):
    """Two words that decide a permutation."""

    a: Any
    b: Any


class Rows(NamedTuple):
    """How many rows a source has, and which are stored together.

    **Attributes:**

    - `total`: how many there are.
    - `chunk`: of the rows that are stored together, or `None` if any order is as fast.
    - `window`: how many chunks are shuffled together.
    """

    total: int
    chunk: int | None = None
    window: int = 1


Order = Literal["sequential", "shuffle", "epochs", "independent"]


def rows(order: Order, data: Rows, seed: Any, epoch: Any, position: Any) -> Any:
    """The rows at positions of epochs.

    **Arguments:**

    - `order`: the name of an order.
    - `data`: how many rows there are.
    - `seed`, `epoch`, `position`: `uint32`, of shapes that broadcast. A position is
        less than `data.total`.

    **Returns:**

    `uint32`, each less than `data.total`.
    """
    with np.errstate(over="ignore"):
        if order == "sequential":
            return position + 0 * epoch
        key = _key(seed, epoch)
        if order == "independent":
            return _independent(key, position, data.total)
        if data.chunk is None:
            return _permuted(key, position, data.total)
        return _permuted_chunks(key, position, data)


def _hash(x: Any) -> Any:
    x = x ^ (x >> 16)
    x = x * _word(0x21F0AAAD)
    x = x ^ (x >> 15)
    x = x * _word(0x735A2D97)
    return x ^ (x >> 15)


def _word(value: int) -> Any:
    return np.uint32(value % 2**32)


def _key(*words: Any) -> Key:
    """A key of words, which is not a function of their sum."""
    a = b = _word(0)
    for i, word in enumerate(words):
        a = _hash(a ^ _hash(word + _word(_GOLDEN * (2 * i + 1))))
        b = _hash(b ^ _hash(word ^ _word(_GOLDEN * (2 * i + 2))) ^ a)
    return Key(a, b)


def _independent(key: Key, position: Any, n: int) -> Any:
    """A row for each position, uniform up to one part in 2**64 / n."""
    high = _hash(_hash(position + key.a) ^ key.b)
    low = _hash(_hash(position ^ key.b) + key.a)
    fraction = _high_product(low, n)
    whole = high * _word(n)
    carry = (whole + fraction) < whole
    return _high_product(high, n) + _ones_where(carry)


def _high_product(x: Any, n: int) -> Any:
    """The upper 32 bits of the product of 64 bits."""
    x0, x1, n0, n1 = x & 0xFFFF, x >> 16, _word(n & 0xFFFF), _word(n >> 16)
    middle = x1 * n0 + ((x0 * n0) >> 16)
    other = x0 * n1 + (middle & 0xFFFF)
    return x1 * n1 + (middle >> 16) + (other >> 16)


def _permuted(key: Key, x: Any, n: int, *, inverse: bool = False) -> Any:
    """A permutation of `range(n)`, at `x`."""
    if n <= _SMALL:
        return _swap_or_not(key, x, n, n, inverse=inverse)
    return _feistel(key, x, n, inverse=inverse)


def _swap_or_not(key: Key, x: Any, n: Any, most: int, *, inverse: bool = False) -> Any:
    """A permutation of `range(n)`; `n` may be an array of numbers up to `most`."""
    xp = jnp if isinstance(x, jax.Array) else np
    n = xp.asarray(n, np.uint32)
    rounds = max(_LEAST_ROUNDS, _ROUNDS_PER_BIT * (most - 1).bit_length())

    def swapped(i: Any, x: Any) -> Any:
        turn = xp.asarray(rounds - i if inverse else i + 1).astype(np.uint32)
        word = _hash(key.a + turn * _word(_GOLDEN))
        other = word % n + n - x
        other = xp.where(other >= n, other - n, other)
        coin = _hash(_hash(xp.maximum(x, other) + word) ^ key.b) >> 31
        return xp.where(coin == 1, other, x)

    if xp is jnp:
        shape = jnp.broadcast_shapes(x.shape, n.shape, jnp.shape(key.a))
        return jax.lax.fori_loop(0, rounds, swapped, jnp.broadcast_to(x, shape))
    return ft.reduce(lambda x, i: swapped(i, x), range(rounds), x)


def _feistel(key: Key, x: Any, n: int, *, inverse: bool) -> Any:
    """A permutation of `range(n)`: one of a few more numbers, until it is inside."""
    xp = jnp if isinstance(x, jax.Array) else np
    sizes = _halves(n)

    def mixed(x: Any) -> Any:
        return _feistel_rounds(key, x, sizes, inverse=inverse)

    def is_outside(x: Any) -> Any:
        return x >= _word(n)

    if xp is jnp:
        return jax.lax.while_loop(
            lambda x: jnp.any(is_outside(x)),
            lambda x: jnp.where(is_outside(x), mixed(x), x),
            mixed(x),
        )
    x = np.array(mixed(x))
    while (outside := is_outside(x)).any():
        x = np.where(outside, mixed(x), x)
    return x


@ft.cache
def _halves(n: int) -> tuple[int, int]:
    """Two numbers of about `sqrt(n)`, whose product is `n` or hardly more."""
    root = math.isqrt(n - 1) + 1
    left = min(range(root, 2 * root), key=lambda size: -n % size)
    return left, -(-n // left)


def _feistel_rounds(key: Key, x: Any, sizes: tuple[int, int], *, inverse: bool) -> Any:
    """A permutation of the numbers below the product of `sizes`."""
    halves = [x // _word(sizes[1]), x % _word(sizes[1])]
    order = range(_FEISTEL_ROUNDS)
    for i in reversed(order) if inverse else order:
        to = i % 2
        size = _word(sizes[to])
        word = _hash(halves[1 - to] + key.a + _word(_GOLDEN * (i + 1)))
        step = _high_product(_hash(word ^ key.b), sizes[to])
        moved = halves[to] + (size - step if inverse else step)
        halves[to] = moved - size * _ones_where(moved >= size)
    return halves[0] * _word(sizes[1]) + halves[1]


def _permuted_chunks(key: Key, position: Any, data: Rows) -> Any:
    """A permutation of all rows that uses one window of chunks at a time.

    The chunks are permuted; then the rows of each `window` of them are.
    """
    assert data.chunk is not None
    chunks = _Chunks(key, data.total, data.chunk)
    slot, _ = chunks.slot_at(position)
    window = slot // _word(data.window)
    first = window * _word(data.window)
    last = _minimum(first + _word(data.window), _word(chunks.count))
    start, end = chunks.start_of(first), chunks.start_of(last)
    most = min(data.window * data.chunk, data.total)
    inside = _swap_or_not(
        _key(key.a, key.b, window), position - start, end - start, most
    )
    slot, offset = chunks.slot_at(start + inside)
    chunk = _permuted(key, slot, chunks.count)
    return chunk * _word(data.chunk) + offset


class _Chunks:
    """Chunks in the order of an epoch; the last chunk of the data may be short."""

    def __init__(self, key: Key, rows: int, chunk: int) -> None:
        self.count = -(-rows // chunk)
        self._chunk = _word(chunk)
        self._short = _word(rows - (self.count - 1) * chunk)
        zero = 0 * key.a
        last = zero + _word(self.count - 1)
        self._short_slot = _permuted(key, last, self.count, inverse=True)

    def start_of(self, slot: Any) -> Any:
        """The first position of a slot."""
        missing = (self._chunk - self._short) * _ones_where(slot > self._short_slot)
        return slot * self._chunk - missing

    def slot_at(self, position: Any) -> tuple[Any, Any]:
        """The slot that a position is in, and its offset there."""
        end = self.start_of(self._short_slot) + self._short
        missing = (self._chunk - self._short) * _ones_where(position >= end)
        shifted = position + missing
        return shifted // self._chunk, shifted % self._chunk


def _ones_where(condition: Any) -> Any:
    """Ones and zeros: a product with bools fails if JAX's promotion is strict."""
    return condition.astype(np.uint32)


def _minimum(a: Any, b: Any) -> Any:
    xp = jnp if isinstance(a, jax.Array) else np
    return xp.minimum(a, b)
