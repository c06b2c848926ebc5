"""How far two versions of a leaf are apart."""

import math
from dataclasses import dataclass

from .._format.leaf_record import from_stored, LeafRecord, scalar_from_text
from .._inspecting.array_statistics import distances
from .._lazy import Array, np


# What is converted to 64 bits at a time fits in the cache of a core.
_BLOCK = 2**16


@dataclass(frozen=True)
class Change:
    """From one version of a leaf to another one.

    **Attributes:**

    - `count`: how many elements differ. Two NaNs are equal.
    - `squares`: the sum of the squared distances that are finite.
    - `largest`: the largest distance; infinite where there is none, as from a number to
        a NaN, or between two keys.
    - `norm`: of all distances; infinite if one of them is.
    """

    count: int = 0
    squares: float = 0.0
    largest: float = 0.0

    def plus(self, other: "Change") -> "Change":
        """Of both parts."""
        return Change(
            self.count + other.count,
            self.squares + other.squares,
            max(self.largest, other.largest),
        )

    @property
    def norm(self) -> float:
        return math.inf if math.isinf(self.largest) else math.sqrt(self.squares)


def change(before: Array, after: Array, record: LeafRecord) -> Change:
    """From one array to another one, both as they are stored."""
    a, b = before.reshape(-1), after.reshape(-1)
    if np.array_equal(a.view(np.uint8), b.view(np.uint8)):
        return Change()
    if record.kind in ("key", "bytes"):
        return Change(int(np.count_nonzero(a != b)), largest=math.inf)
    a, b = from_stored(a, record), from_stored(b, record)
    found = Change()
    with np.errstate(all="ignore"):
        for start in range(0, a.size, _BLOCK):
            found = found.plus(
                _of_blocks(a[start : start + _BLOCK], b[start : start + _BLOCK])
            )
    return found


def _of_blocks(a: Array, b: Array) -> Change:
    far = distances(a, b)
    finite = far[np.isfinite(far)]
    squares = float(np.square(finite).sum())
    return Change(int(np.count_nonzero(far)), squares, float(far.max(initial=0)))


def change_of_scalar(before: LeafRecord, after: LeafRecord) -> Change | None:
    """From one Python number to another one."""
    if before.kind != after.kind:
        return None
    if before.value == after.value:
        return Change()
    a, b = (scalar_from_text(r.kind, r.value or "") for r in (before, after))
    try:
        far = float(abs(b - a))
    except OverflowError:
        far = math.inf
    is_finite = math.isfinite(far)
    return Change(1, far * far, far) if is_finite else Change(1, largest=math.inf)
