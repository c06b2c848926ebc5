"""How far two versions of a leaf are apart."""

import math
from dataclasses import dataclass

from .._format.leaf_record import from_stored, LeafRecord, scalar_from_text
from .._inspecting.array_statistics import distances, norm
from .._lazy import Array, np


# What is converted to 64 bits at a time fits in the cache of a core.
_BLOCK = 2**16


@dataclass(frozen=True)
class Change:
    """From one version of a leaf to another one.

    **Attributes:**

    - `count`: how many elements differ. Two NaNs are equal.
    - `norm`: of all distances.
    - `largest`: the largest distance; infinite where there is none, as from a number to
        a NaN, or between two keys.
    """

    count: int = 0
    norm: float = 0.0
    largest: float = 0.0

    def plus(self, other: "Change") -> "Change":
        """Of both parts."""
        return Change(
            self.count + other.count,
            math.hypot(self.norm, other.norm),
            max(self.largest, other.largest),
        )


def change(before: Array, after: Array, record: LeafRecord) -> Change:
    """From one array to another one, both as they are stored."""
    a, b = before.reshape(-1), after.reshape(-1)
    if np.array_equal(a.view(np.uint8), b.view(np.uint8)):
        return Change()
    if record.kind in ("key", "bytes"):
        return Change(int(np.count_nonzero(a != b)), math.inf, math.inf)
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
    return Change(int(np.count_nonzero(far)), norm(far), float(far.max(initial=0)))


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
    return Change(1, far, far) if math.isfinite(far) else Change(1, math.inf, math.inf)
