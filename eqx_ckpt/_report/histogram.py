"""Histograms of numbers that arrive piece by piece."""

import math
from dataclasses import dataclass

from .._inspecting.array_statistics import Moments
from .._lazy import Array, np


BINS = 48


# What is converted to 64 bits at a time fits in the cache of a core.
_BLOCK = 2**16


# Narrower bins than 2**-1000 would overflow.
_FINEST = -1000


# A float has 53 bits: finer bins than its last one say nothing.
_DIGITS = 53


@dataclass(frozen=True)
class Histogram:
    """Counts in bins whose width is a power of two, and that begin at its multiples.

    Bins of different widths nest, so the pieces of an array, in any order, give the
    same histogram as the whole.

    **Attributes:**

    - `exponent`: the width of a bin is `2**exponent`.
    - `first`: where the first bin begins, in widths.
    - `counts`: of each bin; at most `BINS` of them.
    """

    exponent: int
    first: int
    counts: list[int]

    def plus(self, other: "Histogram") -> "Histogram":
        """Of both, in the narrowest bins that suffice."""
        exponent = max(self.exponent, other.exponent)
        a, b = self._with(exponent), other._with(exponent)
        while max(a._last, b._last) - min(a.first, b.first) >= BINS:
            exponent += 1
            a, b = a._with(exponent), b._with(exponent)
        first = min(a.first, b.first)
        counts = [0] * (max(a._last, b._last) - first + 1)
        for part in (a, b):
            for i, count in enumerate(part.counts, part.first - first):
                counts[i] += count
        return Histogram(exponent, first, counts)

    @property
    def _last(self) -> int:
        return self.first + len(self.counts) - 1

    def _with(self, exponent: int) -> "Histogram":
        shift = exponent - self.exponent
        if shift == 0:
            return self
        first = self.first >> shift
        counts = [0] * ((self._last >> shift) - first + 1)
        for i, count in enumerate(self.counts, self.first):
            counts[(i >> shift) - first] += count
        return Histogram(exponent, first, counts)


def histogram(array: Array, found: Moments) -> Histogram | None:
    """Of the finite numbers of an array, or the absolute values of complex ones.

    `found` are the moments of the array.
    """
    if found.count == 0:
        return None
    flat = array.reshape(-1)
    blocks = [flat[i : i + _BLOCK] for i in range(0, flat.size, _BLOCK)]
    if found.min is None:
        limits = [x for block in blocks for x in _limits(block)]
        if not limits:
            return None
        low, high = min(limits), max(limits)
    else:
        low, high = float(found.min), float(found.max)
    is_whole = array.dtype.kind in "biu" or "int" in array.dtype.name
    exponent = _exponent(low, high, is_whole=is_whole)
    first = _bin(low, exponent)
    counts = np.zeros(_bin(high, exponent) - first + 1, np.int64)
    scale = math.ldexp(1.0, -exponent)
    for block in blocks:
        bins = np.floor(_finite(block) * scale).astype(np.int64) - first
        counts += np.bincount(bins, minlength=counts.size)
    return Histogram(exponent, first, counts.tolist())


def _finite(block: Array) -> Array:
    """The numbers of a block that are finite, in 64 bits."""
    with np.errstate(all="ignore"):
        wide = (np.abs(block) if block.dtype.kind == "c" else block).astype(np.float64)
        return wide if np.isfinite(wide.sum()) else wide[np.isfinite(wide)]


def _limits(block: Array) -> list[float]:
    wide = _finite(block)
    return [float(wide.min()), float(wide.max())] if wide.size else []


def _bin(number: float, exponent: int) -> int:
    return math.floor(math.ldexp(number, -exponent))


def _exponent(low: float, high: float, *, is_whole: bool) -> int:
    """That of the narrowest bins, of which `BINS` reach from `low` to `high`."""
    largest = math.frexp(max(abs(low), abs(high)))[1]
    exponent = max(0 if is_whole else _FINEST, largest - _DIGITS)
    while _bin(high, exponent) - _bin(low, exponent) >= BINS:
        exponent += 1
    return exponent
