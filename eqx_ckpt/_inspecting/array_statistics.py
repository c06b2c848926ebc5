"""How far numbers are apart."""

import math
from dataclasses import dataclass, replace
from typing import Any

from .._lazy import Array, np


def distances(a: Array, b: Array) -> Array:
    """How far each number is from its counterpart, as a float of 64 bits.

    Between two NaNs it is 0, and between what is finite and what is not, infinite. That
    of dates is in their unit.
    """
    if a.dtype.kind in "mM":
        far = _of_integers(a.astype(np.int64), b.astype(np.int64))
        return np.where(np.isnat(a) == np.isnat(b), far, np.inf)
    if a.dtype.kind in "biu":
        return _of_integers(a, b)
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        far = np.abs(a.astype(kind) - b.astype(kind))
        far = np.where((a == b) | ((a != a) & (b != b)), 0, far)
    return np.where(np.isnan(far), np.inf, far)


def _of_integers(a: Array, b: Array) -> Array:
    """Exact before it becomes a float, which cannot hold all integers of 64 bits."""
    low, high = np.minimum(a, b), np.maximum(a, b)
    return (high.astype(np.uint64) - low.astype(np.uint64)).astype(np.float64)


# The smallest sum of squares, none of which may have become 0 and count.
_SMALL = 1e-280


def norm(numbers: Array) -> float:
    """The norm of floats of 64 bits, of which the squares may be too large or small."""
    with np.errstate(all="ignore"):
        # Not `np.vdot`, because the threads of BLAS would compete with each other.
        squares = float(np.square(numbers).sum())
        if _SMALL < squares < math.inf:
            return math.sqrt(squares)
        largest = float(np.max(np.abs(numbers), initial=0))
        if not 0 < largest < math.inf:
            return largest
        return largest * math.sqrt(float(np.square(numbers / largest).sum()))


# Convert so much to 64 bits at a time: it fits into the cache of a core.
_BLOCK = 2**16


@dataclass(frozen=True)
class Moments:
    """Statistics of some numbers; `plus` merges those of others.

    **Attributes:**

    - `count`: the number of finite ones. Except `nan` and `inf`, all statistics are of
        these.
    - `spread`: the norm of the distances from the mean.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    min: Any = None
    max: Any = None
    mean: Any = 0.0
    spread: float = 0.0

    def plus(self, other: "Moments") -> "Moments":
        """Merge the statistics of two sets of numbers, without cancellation."""
        nan, inf = self.nan + other.nan, self.inf + other.inf
        if self.count == 0 or other.count == 0:
            known = self if other.count == 0 else other
            return replace(known, nan=nan, inf=inf)
        count = self.count + other.count
        gap = other.mean - self.mean
        between = abs(gap) * math.sqrt(self.count * other.count / count)
        return Moments(
            count,
            nan,
            inf,
            None if self.min is None else min(self.min, other.min),
            None if self.max is None else max(self.max, other.max),
            self.mean + gap * (other.count / count),
            math.hypot(self.spread, other.spread, between),
        )

    @property
    def std(self) -> float:
        return self.spread / math.sqrt(self.count) if self.count else 0.0

    @property
    def norm(self) -> float:
        return math.hypot(self.spread, math.sqrt(self.count) * abs(self.mean))


def moments(array: Array) -> Moments:
    """Compute the statistics of an array of any dtype, in 64 bits."""
    flat, found = array.reshape(-1), Moments()
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, _BLOCK):
            found = found.plus(_of_block(flat[start : start + _BLOCK]))
    return found


def _of_block(block: Array) -> Moments:
    wide = block.astype(np.complex128 if block.dtype.kind == "c" else np.float64)
    total, nan, inf = wide.sum(), 0, 0
    if not np.isfinite(total):
        finite = np.isfinite(wide)
        nan = int(np.count_nonzero(np.isnan(wide)))
        inf = wide.size - nan - int(np.count_nonzero(finite))
        block, wide = block[finite], wide[finite]
        total = wide.sum()
    if wide.size == 0:
        return Moments(nan=nan, inf=inf)
    mean = total / wide.size
    if not np.isfinite(mean):
        mean = (wide / wide.size).sum()
    low, high = _limits(block, wide)
    wide -= mean
    spread = norm(wide.view(np.float64))
    return Moments(wide.size, nan, inf, low, high, mean.item(), spread)


def _limits(block: Array, wide: Array) -> tuple[Any, Any]:
    """The smallest and the largest number; complex ones have no order."""
    if wide.dtype.kind == "c":
        return None, None
    if block.dtype.kind in "iu":  # A float cannot hold all integers of 64 bits.
        return int(block.min()), int(block.max())
    low, high = float(wide.min()), float(wide.max())
    is_whole = block.dtype.kind == "b" or "int" in block.dtype.name
    return (int(low), int(high)) if is_whole else (low, high)
