"""Read parts of leaves, and compare two checkpoints."""

import difflib
import math
import re
from collections.abc import Iterator
from typing import Any

import eqx_ckpt

from .._format.chunks import blocks, whole
from .._format.distance import distances
from .._format.lazy import Array, np
from .._format.leaves import from_stored
from .._format.source import read_regions
from ._sources import source_at


_INDEX = re.compile(r"(?P<name>.*?)(\[(?P<index>[-0-9:, ]*)\])?\Z", re.S)


def split_index(text: str) -> tuple[str, tuple[Any, ...]]:
    """Split `NAME[0:3, :]` into the name and the index, which is as in NumPy."""
    found = _INDEX.match(text)
    assert found is not None
    name, index = found["name"], found["index"] or ""
    try:
        return name, tuple(_slice(part) for part in index.split(",") if part.strip())
    except (TypeError, ValueError):
        raise eqx_ckpt.CheckpointError(
            f"[{index}] is not an index. Pass integers and slices: `{name}[0, 2:5]`."
        ) from None


def _slice(text: str) -> int | slice:
    if ":" not in text:
        return int(text)
    found = slice(*(int(part) if part.strip() else None for part in text.split(":")))
    # As NumPy, this refuses a step of zero.
    found.indices(0)
    return found


def leaf_named(source: eqx_ckpt.Source, name: str) -> tuple[eqx_ckpt.LeafRecord, Any]:
    """Read the record and the value of one leaf."""
    names = source.manifest.leaves
    if (why := source.manifest.unsaved.get(name)) is not None:
        raise eqx_ckpt.LeafMismatchError(f"{name!r} was left out: {why}.")
    if name not in names:
        close = difflib.get_close_matches(name, names, 3, 0.4)
        below = [other for other in names if other.startswith(name + "/")][:3]
        hint = f" Did you mean {', '.join(map(repr, below or close))}?"
        raise eqx_ckpt.LeafMismatchError(
            f"There is no leaf {name!r}.{hint if below or close else ''}"
        )
    leaves = eqx_ckpt.leaves(source, prefix=name)
    return next((record, value) for found, record, value in leaves if found == name)


def differences(
    a: str, b: str, values: bool, damage: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """The differences of each leaf: in the manifests and, if asked for, in the data."""
    first, second = source_at(a), source_at(b)
    left, right = first.manifest.leaves, second.manifest.leaves
    for name in dict.fromkeys([*left, *right]):
        x, y = left.get(name), right.get(name)
        entry: dict[str, Any] = {"name": name, "a": _words(x), "b": _words(y)}
        if x is None or y is None:
            yield entry | {"status": "only in a" if y is None else "only in b"}
        elif (x[:3], x.impl) != (y[:3], y.impl):
            yield entry | {"status": "another type"}
        elif x.value is not None:
            if x.value != y.value:
                entry |= {"a": x.value, "b": y.value}
                yield entry | {"status": "another value"}
        elif values:
            try:
                found = _compare(first, second, name, x, y)
            except eqx_ckpt.CorruptCheckpointError as e:
                damage[name] = str(e)
                continue
            if found:
                yield entry | {"status": "other values"} | found


def _words(record: eqx_ckpt.LeafRecord | None) -> str | None:
    return None if record is None else str(record)


def _compare(
    first: eqx_ckpt.Source,
    second: eqx_ckpt.Source,
    name: str,
    x: eqx_ckpt.LeafRecord,
    y: eqx_ckpt.LeafRecord,
) -> dict[str, Any]:
    """Measure how much the data of two leaves differ; nothing if they are equal."""
    count, apart = 0, 0.0
    shares: list[float] = []
    for piece in blocks(whole(x.data_shape), x.chunk_shape, x.itemsize):
        (a,) = read_regions(first, [eqx_ckpt.RegionRead(name, x, piece)])
        (b,) = read_regions(second, [eqx_ckpt.RegionRead(name, y, piece)])
        if a.tobytes() == b.tobytes():
            continue
        a, b = from_stored(a, x), from_stored(b, y)
        far = distances(a, b)
        count += int(np.count_nonzero(far))
        apart = max(apart, float(np.max(far)))
        # A date has no size that its distance could be a share of.
        if a.dtype.kind not in "mM":
            shares.append(_relative(far, a, b))
    if not count:
        return {}
    return {"count": count, "max_abs": apart, "max_rel": max(shares, default=None)}


def _relative(far: Array, a: Array, b: Array) -> float:
    """The largest of the distances, each as a share of the larger number."""
    if np.isinf(far).any():
        return math.inf
    a, b = a[far > 0], b[far > 0]
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    sizes = np.maximum(np.abs(a.astype(kind)), np.abs(b.astype(kind)))
    return float(np.max(far[far > 0] / sizes, initial=0))
