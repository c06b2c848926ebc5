"""What a restore would do, leaf by leaf, and how to say it."""

import difflib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import jax

from .._format.leaves import LeafRecord, NARROWED
from .sharding import Place


Status: TypeAlias = Literal[
    "same", "missing", "unexpected", "kind", "shape", "dtype", "sharding", "changed"
]


@dataclass(frozen=True)
class LeafMatch:
    """One leaf of `like` beside the leaf of the checkpoint of the same name.

    **Attributes:**

    - `status`: `"same"`; `"missing"` from the checkpoint; `"unexpected"`: in the
        checkpoint, but not in `like`; another `"kind"` (of leaf), `"shape"` or
        `"dtype"`; a `"sharding"` that it cannot have; or `"changed"`: a leaf that is
        never saved, such as a function, is another one than when the checkpoint was
        saved.
    - `expected`: what `like` has; it prints in words.
    - `found`: what the checkpoint has; it prints in words.
    - `nearest`: the most similar names, for a missing leaf.
    - `replicated`: the axes of its saved sharding over which it would be replicated,
        because the mesh lacks them or they do not divide it.
    """

    status: Status
    expected: LeafRecord | str = "nothing"
    found: LeafRecord | str = "nothing"
    nearest: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()


@dataclass(frozen=True)
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


def with_place(match: LeafMatch, place: Place) -> LeafMatch:
    if place.problem:
        return replace(match, status="sharding", expected=place.problem)
    return replace(match, replicated=place.dropped) if place.dropped else match


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
        dtypes.add(NARROWED.get(found.dtype, found.dtype))
    return "same" if expected.dtype in dtypes else "dtype"


def would_narrow(record: LeafRecord) -> bool:
    """Whether JAX would cut an array to 32 bits, which it does without a word."""
    return record.dtype in NARROWED and (
        jax.dtypes.canonicalize_dtype(record.dtype).name != record.dtype
    )


def nearest(name: str, candidates: Collection[str]) -> tuple[str, ...]:
    """The most similar names; among many, only those that end in the same key."""
    if len(candidates) > 200:
        last = name.rpartition("/")[2]
        candidates = [c for c in candidates if c.rpartition("/")[2] == last][:200]
    return tuple(difflib.get_close_matches(name, candidates, n=3))


def describe(leaves: Mapping[str, LeafMatch]) -> list[str]:
    """One line for each leaf."""
    return [f"- {name!r}: {_sentence(leaf)}" for name, leaf in leaves.items()]


def _sentence(leaf: LeafMatch) -> str:
    if leaf.status == "missing":
        hint = ", ".join(map(repr, leaf.nearest))
        found = f" ({leaf.found})" if leaf.found != "nothing" else ""
        return f"{leaf.expected} in `like`, not in the checkpoint{found}." + (
            f" Did you mean {hint}?" if hint else ""
        )
    if leaf.status == "unexpected":
        return f"not in `like`, {leaf.found} in the checkpoint."
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
    "Python number. Bytes of a custom `filter_spec` need the spec that reads them.",
}


def explain(match: Match) -> str:
    """The text of the error: every leaf, then the ways out."""
    problems = match.problems
    ways = {leaf.status for leaf in problems.values()}
    return "\n".join(
        ["The checkpoint does not match `like`:", *describe(problems)]
        + [way for status, way in WAYS_OUT.items() if status in ways]
    )
