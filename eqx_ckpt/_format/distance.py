"""How far numbers are apart."""

from .lazy import Array, np


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
