"""How the leaves of two checkpoints differ."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._errors import CorruptCheckpointError
from .._format.chunk_grid import blocks, Region, whole
from .._format.leaf_record import from_stored, LeafRecord, scalar_from_text
from .._format.source import raise_damage, read_regions, RegionRead, Source
from .._lazy import Array, np
from .._sources.consistent_read import read_consistently
from .._tree.matching.foreign_spelling import respelled
from .._types import check_flag, PathLike
from .array_statistics import distances


@dataclass(frozen=True)
class LeafDiff:
    """How a leaf of one checkpoint differs from that of another.

    **Attributes:**

    - `status`: `"only in a"`, `"only in b"`, `"different type"`, `"different value"`
        (of a Python number), or `"different values"` (of an array).
    - `a`, `b`: the type of the leaf in each checkpoint, or the value of a Python
        number; `None` where it is missing.
    - `count`: how many elements of the arrays differ.
    - `max_abs`, `max_rel`: the largest difference, and the largest as a share of the
        larger number. Of dates, `max_abs` is in their unit, and `max_rel` is `None`.
    """

    status: str
    a: str | None
    b: str | None
    count: int = 0
    max_abs: float = 0.0
    max_rel: float | None = None


def diff(
    a: PathLike | Source,
    b: PathLike | Source,
    *,
    values: bool = False,
    kinds: bool = True,
) -> dict[str, LeafDiff]:
    """Compare the leaves of two checkpoints.

    **Arguments:**

    - `a`, `b`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][].
    - `values`: compare the data of arrays too. They are read chunk by chunk, and their
        checksums are verified.
    - `kinds`: whether leaves of the same dtype and shape differ if one is an array of
        JAX and the other one of NumPy, or a Python number, which counts as `float64`,
        `int64`, `complex128` or `bool`; or PRNG keys and their key data. `False` is for
        what went through another format.

    **Returns:**

    A [`eqx_ckpt.inspect.LeafDiff`][] for each leaf that differs, by its name in `a`, or
    in `b` if `a` lacks it.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `a` or `b`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: leaves are damaged; names each of them.
    - `OSError`: the file system fails.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("before", {"w": jnp.array([1.0, 2.0])})
        eqx_ckpt.tree_serialise_leaves("after", {"w": jnp.array([1.0, 2.5])})
        assert eqx_ckpt.inspect.diff("before", "after") == {}
        found = eqx_ckpt.inspect.diff("before", "after", values=True)
        assert found["w"].count == 1
        assert found["w"].max_abs == 0.5
        ```
    """
    check_flag("values", values)
    check_flag("kinds", kinds)

    def compared(first: Source, second: Source) -> dict[str, LeafDiff]:
        found, damage = differences(first, second, values=values, kinds=kinds)
        raise_damage(damage, first)
        return found

    return read_consistently(
        a, lambda first: read_consistently(b, lambda second: compared(first, second))
    )


def differences(
    first: Source, second: Source, *, values: bool, kinds: bool
) -> tuple[dict[str, LeafDiff], dict[str, str]]:
    """As `diff`, with what is damaged by name, instead of an error."""
    found: dict[str, LeafDiff] = {}
    damage: dict[str, str] = {}
    for (name, there), x, y in _pairs(first, second):
        leaves = _Leaf(first, name, x), _Leaf(second, there, y)
        try:
            one = _difference(*leaves, values=values, kinds=kinds)
        except CorruptCheckpointError as e:
            damage[name] = str(e)
            continue
        if one is not None:
            found[name] = one
    return found, damage


def _difference(
    x: "_Leaf", y: "_Leaf", *, values: bool, kinds: bool
) -> LeafDiff | None:
    a, b = x.record, y.record
    words = (None if a is None else str(a), None if b is None else str(b))
    if a is None or b is None:
        return LeafDiff("only in a" if b is None else "only in b", *words)
    if kinds:
        same = (a[:3], a.impl) == (b[:3], b.impl)
    else:
        same = _stored_type(a) == _stored_type(b)
    if not same:
        return LeafDiff("different type", *words)
    if a.value is not None and b.value is not None:
        same = a.value == b.value or (a.kind != b.kind and x.number() == y.number())
        return None if same else LeafDiff("different value", a.value, b.value)
    if values or a.value is not None or b.value is not None:
        measured = _measured(x, y, is_stored=not kinds)
        return LeafDiff("different values", *words, *measured) if measured else None
    return None


class _Leaf(NamedTuple):
    source: Source
    name: str
    record: LeafRecord | None

    def number(self) -> Any:
        assert self.record is not None
        return scalar_from_text(self.record.kind, self.record.value or "")

    def read(self, region: Region) -> Array:
        """A part of the data as it is stored; a Python number is an array."""
        assert self.record is not None
        if self.record.value is not None:
            return np.asarray(self.number())
        read = RegionRead(self.name, self.record, region)
        (found,) = read_regions(self.source, [read])
        return found


def _pairs(
    first: Source, second: Source
) -> Iterator[tuple[tuple[str, str], LeafRecord | None, LeafRecord | None]]:
    """The leaves of both, each with its names in the two."""
    left, right = first.manifest.leaves, second.manifest.leaves
    other = respelled(first.manifest, second.manifest)
    found = {*other.values()}
    for name in dict.fromkeys([*left, *(n for n in right if n not in found)]):
        there = other.get(name, name)
        yield (name, there), left.get(name), right.get(there)


def _stored_type(record: LeafRecord) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of the stored data, whatever made them."""
    if record.value is None:
        return record.data_type, record.data_shape
    number = scalar_from_text(record.kind, record.value)
    return np.asarray(number).dtype.name, ()


def _measured(
    x: _Leaf, y: _Leaf, *, is_stored: bool
) -> tuple[int, float, float | None] | None:
    """How many elements differ, and how far they are apart; nothing if none does."""
    assert x.record is not None
    assert y.record is not None
    of = x.record if x.record.value is None else y.record
    count, apart = 0, 0.0
    shares: list[float] = []
    for piece in blocks(whole(of.data_shape), of.chunk_shape, of.itemsize):
        a, b = x.read(piece), y.read(piece)
        if a.tobytes() == b.tobytes():
            continue
        if not is_stored:
            a, b = from_stored(a, x.record), from_stored(b, y.record)
        a, b = np.atleast_1d(a), np.atleast_1d(b)
        far = distances(a, b)
        count += int(np.count_nonzero(far))
        apart = max(apart, float(np.max(far)))
        # A date has no size that its distance could be a share of.
        if a.dtype.kind not in "mM":
            shares.append(_relative(far, a, b))
    return (count, apart, max(shares, default=None)) if count else None


def _relative(far: Array, a: Array, b: Array) -> float:
    """The largest of the distances, each as a share of the larger number."""
    if np.isinf(far).any():
        return math.inf
    a, b = a[far > 0], b[far > 0]
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    sizes = np.maximum(np.abs(a.astype(kind)), np.abs(b.astype(kind)))
    return float(np.max(far[far > 0] / sizes, initial=0))
