"""Statistics of numbers that arrive piece by piece."""

import math
from dataclasses import dataclass, replace
from typing import Any

from .lazy import Array, np


# What is converted to 64 bits at a time fits in the cache of a core.
_BLOCK = 2**16


@dataclass(frozen=True)
class Moments:
    """What is known of numbers so far; `plus` adds those of others.

    **Attributes:**

    - `count`: how many are finite. All others but `nan` and `inf` are of these.
    - `squares`: the sum of the squared distances from the mean.
    """

    count: int = 0
    nan: int = 0
    inf: int = 0
    min: Any = None
    max: Any = None
    mean: Any = 0.0
    squares: float = 0.0

    def plus(self, other: "Moments") -> "Moments":
        """Of both; the means are combined without cancellation."""
        nan, inf = self.nan + other.nan, self.inf + other.inf
        if self.count == 0 or other.count == 0:
            known = self if other.count == 0 else other
            return replace(known, nan=nan, inf=inf)
        count = self.count + other.count
        gap = other.mean - self.mean
        # A power would raise where a product becomes infinite.
        between = abs(gap) * abs(gap) * (self.count * other.count / count)
        return Moments(
            count,
            nan,
            inf,
            None if self.min is None else min(self.min, other.min),
            None if self.max is None else max(self.max, other.max),
            self.mean + gap * (other.count / count),
            self.squares + other.squares + between,
        )

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    @property
    def norm(self) -> float:
        mean = math.sqrt(self.count) * abs(self.mean)
        return math.hypot(math.sqrt(self.squares), mean)


def moments(array: Array) -> Moments:
    """The moments of numbers of any dtype, computed in 64 bits."""
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
    parts = wide.view(np.float64)
    # Not `np.vdot`, whose threads of its own would wait for each other.
    squares = float(np.square(parts, out=parts).sum())
    return Moments(wide.size, nan, inf, low, high, mean.item(), squares)


def _limits(block: Array, wide: Array) -> tuple[Any, Any]:
    """The smallest and the largest number; complex ones have no order."""
    if wide.dtype.kind == "c":
        return None, None
    if block.dtype.kind in "iu":  # 64 bits of them do not fit in a float.
        return int(block.min()), int(block.max())
    low, high = float(wide.min()), float(wide.max())
    is_whole = block.dtype.kind == "b" or "int" in block.dtype.name
    return (int(low), int(high)) if is_whole else (low, high)
