"""What a restore would do, leaf by leaf, and how to say it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple, TypeAlias

import jax

from .._format.leaves import LeafRecord, SCALAR_KINDS
from .._format.screen import table_html
from .sharding import Place
from .similar import renamed


Status: TypeAlias = Literal[
    "same", "missing", "unexpected", "kind", "shape", "dtype", "sharding", "changed"
]
# `eqx.filter_eval_shape` narrows the dtype of NumPy leaves while x64 is off.
_NARROWED = {
    "float64": "float32",
    "int64": "int32",
    "uint64": "uint32",
    "complex128": "complex64",
}


class LeafMatch(NamedTuple):
    """One leaf of `like` beside the leaf of the checkpoint of the same name.

    **Attributes:**

    - `status`: `"same"`; `"missing"` from the checkpoint; `"unexpected"`: in the
        checkpoint, but not in `like`; another `"kind"` (of leaf), `"shape"` or
        `"dtype"`; a `"sharding"` that it cannot have; or `"changed"`: a leaf that is
        never saved, such as a function, is another one than when the checkpoint was
        saved.
    - `expected`: what `like` has; it prints in words.
    - `found`: what the checkpoint has; it prints in words.
    - `nearest`: the most similar names, for a missing leaf; of very many, for those
        that were renamed together, and the first ones of the others.
    - `replicated`: the axes of its saved sharding over which it would be replicated,
        because the mesh lacks them or they do not divide it.
    """

    status: Status
    expected: LeafRecord | str = "nothing"
    found: LeafRecord | str = "nothing"
    nearest: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Match:
    """What a restore would do; `print` it, or look at its parts.

    **Attributes:**

    - `leaves`: a [`eqx_ckpt.LeafMatch`][] for every leaf, by its name.
    - `nbytes`: the bytes that the restore would read.
    """

    leaves: Mapping[str, LeafMatch]
    nbytes: int

    @property
    def problems(self) -> dict[str, LeafMatch]:
        """The leaves that stop a restore."""
        harmless = ("same", "changed")
        return {
            n: leaf for n, leaf in self.leaves.items() if leaf.status not in harmless
        }

    @property
    def ok(self) -> bool:
        """Whether the restore would succeed."""
        return not self.problems

    def __str__(self) -> str:
        counts = Counter(leaf.status for leaf in self.leaves.values())
        summary = (
            ", ".join(f"{n} {status}" for status, n in counts.items()) or "no leaf"
        )
        differing = {
            name: leaf
            for name, leaf in self.leaves.items()
            if leaf.status != "same" or leaf.replicated
        }
        lines = [f"{summary}; {self.nbytes} bytes to read.", *describe(differing)]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (name, leaf.status, str(leaf.expected), str(leaf.found))
            for name, leaf in self.leaves.items()
            if leaf.status != "same"
        ]
        head = escape(str(self).splitlines()[0])
        columns = ("leaf", "status", "in `like`", "in the checkpoint")
        return f"<p>{head}</p>{table_html(columns, rows)}" if rows else f"<p>{head}</p>"


def with_place(match: LeafMatch, place: Place) -> LeafMatch:
    if place.problem:
        return match._replace(status="sharding", expected=place.problem)
    return match._replace(replicated=place.dropped) if place.dropped else match


def difference(expected: LeafRecord, found: LeafRecord) -> Status:
    """How a leaf of the checkpoint differs from a leaf of `like`."""
    same_kind = expected.kind == found.kind or (
        expected.kind == "struct" and found.kind in ("jax", "numpy", "numpy_scalar")
    )
    if not same_kind:
        return "kind"
    if expected.shape != found.shape:
        return "shape"
    if expected.impl != found.impl or (found.kind == "jax" and would_narrow(found)):
        return "dtype"
    dtypes = {found.dtype}
    if expected.kind == "struct" and found.kind != "jax":
        # The skeleton narrowed it; the leaf comes back as NumPy, as it was saved.
        dtypes.add(_NARROWED.get(found.dtype, found.dtype))
    return "same" if expected.dtype in dtypes else "dtype"


def would_narrow(record: LeafRecord) -> bool:
    """Whether JAX would cut an array to 32 bits, which it does without a word."""
    return record.dtype in _NARROWED and (
        jax.dtypes.canonicalize_dtype(record.dtype).name != record.dtype
    )


def did_you_mean(names: Sequence[str]) -> str:
    return f" Did you mean {', '.join(map(repr, names))}?" if names else ""


_BY_PARTS = "Restore such a part by itself, with its name there as `prefix`."


def describe(leaves: Mapping[str, LeafMatch]) -> list[str]:
    """One line for all that were renamed together, and for each other leaf.

    Of many leaves that differ in the same way, the first ones stand for all.
    """
    lines, rest = _renamed(leaves)
    if len(lines) > _MOST_LINES:
        more = f"- And {len(lines) - _MOST_LINES} more parts that seem to be renamed."
        lines[_MOST_LINES:] = [more]
    counts: Counter[Status] = Counter()
    for name, leaf in rest.items():
        counts[leaf.status] += 1
        if counts[leaf.status] <= _MOST_LINES:
            lines.append(f"- {name!r}: {_sentence(leaf)}")
    lines += [
        f"- And {n - _MOST_LINES} more leaves that are {_STATUS[status]}."
        for status, n in counts.items()
        if n > _MOST_LINES
    ]
    return lines


def _renamed(
    leaves: Mapping[str, LeafMatch],
) -> tuple[list[str], Mapping[str, LeafMatch]]:
    """What to say of leaves that were renamed together, and the others."""
    nearest = {n: leaf.nearest[0] for n, leaf in leaves.items() if leaf.nearest}
    lines: list[str] = []
    told: set[str] = set()
    for change, names in renamed(nearest):
        name, other = next(iter(names.items()))
        from_below = other == f"{change.after}/{name}"
        lines.append(
            f"- {len(names)} leaves seem to be renamed: {name!r} in `like`, {other!r} "
            "in the checkpoint, and so on. "
            + (f"Pass `prefix={change.after!r}`." if from_below else _BY_PARTS)
        )
        told |= names.keys() | {*names.values()}
    return lines, {n: leaf for n, leaf in leaves.items() if n not in told}


def _sentence(leaf: LeafMatch) -> str:
    if leaf.status == "missing":
        found = f" ({leaf.found})" if leaf.found != "nothing" else ""
        missing = f"{leaf.expected} in `like`, not in the checkpoint{found}."
        return missing + did_you_mean(leaf.nearest)
    if leaf.status == "unexpected":
        expected = "not" if leaf.expected == "nothing" else leaf.expected
        return f"{expected} in `like`, {leaf.found} in the checkpoint."
    if leaf.status == "sharding":
        return f"{leaf.found}: {leaf.expected}."
    if leaf.replicated:
        axes = ", ".join(map(repr, leaf.replicated))
        return f"{leaf.found}: replicated, not sharded, over {axes}."
    difference = {"changed": "not saved, and changed", "same": "same"}
    words = difference.get(leaf.status, f"another {leaf.status}")
    return f"{words}: {leaf.expected} in `like`, {leaf.found} in the checkpoint."


WAYS_OUT: Mapping[Status, str] = {
    "missing": "To keep a leaf's value from `like`, exclude it with `filter_spec`, or "
    "choose what to restore with `where`.",
    "unexpected": "To restore a part of the checkpoint, choose it with `where` or "
    "`prefix`; the rest is then not looked at.",
    "shape": "Shapes are never padded, cut or broadcast: build `like` with the "
    "hyperparameters that the checkpoint was saved with.",
    "dtype": "Dtypes are never cast: restore with the dtype on disk, then cast. 64-bit "
    "JAX arrays need `jax.enable_x64(True)`.",
    "sharding": "The axes in a PartitionSpec have to divide the dimension that they "
    "are for. Choose another one, or pass a mesh as `sharding`, which replicates where "
    "the saved PartitionSpecs do not fit.",
    "kind": "Leaves come back as what they were saved: a JAX array, a NumPy array, a "
    "Python number, of which a subclass such as an `IntEnum` is made again. Bytes of a "
    "custom `filter_spec` need the spec that reads them.",
}


_STATUS: Mapping[Status, str] = {
    "missing": "not in the checkpoint",
    "unexpected": "not in `like`",
    "kind": "of another kind",
    "shape": "of another shape",
    "dtype": "of another dtype",
    "sharding": "not to be sharded so",
    "changed": "not saved, and changed",
    "same": "replicated",
}
_MOST_LINES = 20


def explain(match: Match) -> str:
    """The text of the error: the leaves, then the ways out."""
    problems = match.problems
    ways = {leaf.status for leaf in problems.values()}
    return "\n".join(
        ["The checkpoint does not match `like`:", *describe(problems)]
        + [way for status, way in WAYS_OUT.items() if status in ways]
        + sorted(_hints(problems.values()))
    )


def _hints(leaves: Iterable[LeafMatch]) -> set[str]:
    """What to do about a tree that a transformation of JAX or Equinox has made."""
    pairs = {(leaf.status, _kind(leaf.expected), _kind(leaf.found)) for leaf in leaves}
    return {hint for pair in pairs for hint in _hints_of(*pair)}


def _kind(leaf: LeafRecord | str) -> str:
    return leaf.kind if isinstance(leaf, LeafRecord) else leaf


def _hints_of(status: str, expected: str, found: str) -> Iterator[str]:
    if status == "kind" and expected == "struct" and found in SCALAR_KINDS:
        yield (
            "`jax.eval_shape` makes a `jax.ShapeDtypeStruct` of a Python number: use "
            "`equinox.filter_eval_shape`, which leaves it as it is."
        )
    if (status == "unexpected" and expected == "`None`") or (
        status == "missing" and expected in ("float", "bool")
    ):
        yield (
            "Python numbers such as `Dropout.p` are leaves too, and have `None` "
            "in their place after `equinox.partition`. Restore a whole model, and "
            "partition it then; if only its parameters were saved, restore them, and "
            "`equinox.combine` them with the rest."
        )
