"""How the leaves of two checkpoints differ."""

import math
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from .._errors import CorruptCheckpointError, LeafMismatchError
from .._format.chunk_grid import blocks, Region, whole
from .._format.leaf_names import folders, is_below
from .._format.leaf_record import from_stored, LeafRecord, scalar_from_text
from .._format.source import raise_damage, read_regions, RegionRead, Source
from .._lazy import Array, np
from .._sources.consistent_read import read_consistently
from .._tree.matching.foreign_spelling import respelled
from .._tree.matching.name_tree import without_slashes
from .._tree.matching.similar_names import instead_of
from .._types import check_flag, PathLike
from .array_statistics import distances, norm
from .tree_diff import LeafDiff, TreeDiff


def diff(
    a: PathLike | Source,
    b: PathLike | Source,
    prefix: str = "",
    *,
    values: bool = False,
    kinds: bool = True,
) -> TreeDiff:
    """Compare the leaves of two checkpoints.

    **Arguments:**

    - `a`, `b`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][].
    - `prefix`: only the leaves below this name.
    - `values`: compare the data of arrays too. They are read chunk by chunk, and their
        checksums are verified.
    - `kinds`: whether leaves of the same dtype and shape differ if one is an array of
        JAX and the other one of NumPy, or a Python number, which counts as `float64`,
        `int64`, `complex128` or `bool`; or PRNG keys and their key data. `False` is for
        what went through another format.

    **Returns:**

    A [`eqx_ckpt.inspect.TreeDiff`][]: a dictionary that prints as a table. It has a
    [`eqx_ckpt.inspect.LeafDiff`][] for each leaf that differs, by its name in `a`, or
    in `b` if `a` lacks it.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `a` or `b`.
    - [`eqx_ckpt.LeafMismatchError`][]: neither has a leaf below `prefix`.
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
        assert found["w"].norm_rel == 0.5 / 5**0.5
        ```
    """
    check_flag("values", values)
    check_flag("kinds", kinds)

    def compared(first: Source, second: Source) -> TreeDiff:
        found, damage = differences(first, second, prefix, values=values, kinds=kinds)
        raise_damage(damage, first)
        return found

    return read_consistently(
        a, lambda first: read_consistently(b, lambda second: compared(first, second))
    )


def differences(
    first: Source, second: Source, prefix: str, *, values: bool, kinds: bool
) -> tuple[TreeDiff, dict[str, str]]:
    """As `diff`, with what is damaged by name, instead of an error."""
    found: list[tuple[_Place, str, LeafDiff]] = []
    damage: dict[str, str] = {}
    pairs = _below(prefix, [*_pairs(first, second)])
    for (name, there), x, y in pairs:
        leaves = _Leaf(first, name, x), _Leaf(second, there, y)
        try:
            one = _difference(*leaves, values=values, kinds=kinds)
        except CorruptCheckpointError as e:
            damage[name] = str(e)
            continue
        if one is not None:
            found.append((_place_of(one, x), name, one))
    found.sort(key=operator.itemgetter(0))
    return TreeDiff([(name, one) for _, name, one in found], len(pairs)), damage


# Of a leaf in the order of a result.
_Place: TypeAlias = tuple[int, float]


def _place_of(leaf: LeafDiff, record: LeafRecord | None) -> _Place:
    if record is None or leaf.status in ("only in a", "different type"):
        return 0, 0.0
    if leaf.norm_rel is None or not _FLOATS.match(record.dtype):
        return 2, 0.0
    return 1, -leaf.norm_rel


_FLOATS = re.compile("[<>]?(bfloat|float|complex|[fc][0-9])")


_Pair: TypeAlias = tuple[tuple[str, str], LeafRecord | None, LeafRecord | None]


def _below(prefix: str, pairs: Sequence[_Pair]) -> Sequence[_Pair]:
    """The pairs whose names are below a prefix; raise if neither source has one."""
    prefix = without_slashes(prefix)
    chosen = [pair for pair in pairs if is_below(prefix, pair[0][0])]
    if prefix and not chosen:
        names = [name for (name, _), _, _ in pairs]
        raise LeafMismatchError(
            f"`prefix` is {prefix!r}, and neither checkpoint has a leaf of that name "
            f"or below it.{instead_of(prefix, [*names, *folders(names)])}"
        )
    return chosen


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


def _pairs(first: Source, second: Source) -> Iterator[_Pair]:
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
) -> tuple[int, float, float | None, float | None] | None:
    """How many elements differ, and how far they are apart; nothing if none does."""
    assert x.record is not None
    assert y.record is not None
    of = x.record if x.record.value is None else y.record
    count, apart, total = 0, 0.0, 0.0
    shares: list[float] = []
    equal: list[Region] = []
    before = 0.0
    for piece in blocks(whole(of.data_shape), of.chunk_shape, of.itemsize):
        a, b = x.read(piece), y.read(piece)
        if a.tobytes() == b.tobytes():
            equal.append(piece)
            continue
        if not is_stored:
            a, b = from_stored(a, x.record), from_stored(b, y.record)
        a, b = np.atleast_1d(a), np.atleast_1d(b)
        far = distances(a, b)
        count += int(np.count_nonzero(far))
        apart = max(apart, float(np.max(far)))
        total = math.hypot(total, norm(far))
        before = math.hypot(before, _size(a))
        # A date has no size that its distance could be a share of.
        if a.dtype.kind not in "mM":
            shares.append(_relative(far, a, b))
    if not count:
        return None
    largest = max(shares, default=None)
    if largest is None or "key" in (x.record.kind, y.record.kind) or of.kind == "bytes":
        return count, apart, largest, None
    for piece in equal if total < math.inf else ():
        a = x.read(piece)
        before = math.hypot(before, _size(a if is_stored else from_stored(a, x.record)))
    is_finite = total < math.inf and before > 0
    return count, apart, largest, total / before if is_finite else math.inf


def _size(array: Array) -> float:
    """The norm of the finite numbers of an array."""
    kind = np.complex128 if array.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        sizes = np.abs(array.astype(kind))
    return norm(sizes[np.isfinite(sizes)])


def _relative(far: Array, a: Array, b: Array) -> float:
    """The largest of the distances, each as a share of the larger number."""
    if np.isinf(far).any():
        return math.inf
    a, b = a[far > 0], b[far > 0]
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    sizes = np.maximum(np.abs(a.astype(kind)), np.abs(b.astype(kind)))
    return float(np.max(far[far > 0] / sizes, initial=0))
