"""The plan of a restore: every difference is found here, before a byte is read."""

import functools as ft
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import Sharding
from jaxtyping import PyTree

from ..._errors import LeafMismatchError
from ..._format.leaf_names import below, encode, is_below
from ..._format.leaf_record import LeafRecord
from ..._format.manifest import Manifest
from ..._types import check_word, IsLeaf, TypedPath
from ..leaves.casting import Casting, WORDS
from ..leaves.filter_spec import (
    array_deserialise_filter_spec,
    default_deserialise_filter_spec,
)
from ..leaves.key_paths import key_paths, typed
from ..leaves.leaf_kinds import describe_like, fingerprint
from ..leaves.transient import is_transient, note_in, stop_at_transients, Transient
from ..matching.explain_match import explain
from ..matching.foreign_spelling import spelled
from ..matching.leaf_match import LeafMatch, problems_of, with_place
from ..matching.name_tree import checked_prefix
from ..matching.sharding_argument import ANYWHERE, Place, place, targets_of
from ..matching.similar_names import similar
from ..matching.where_argument import chosen_by
from ..transform.transform_argument import (
    derive,
    Derived,
    described,
    Origin,
    Transform,
    unreturned,
)
from ..transform.transform_parts import Part, parts_of, Read
from .custom_match import custom_without_record, never_saved
from .match_leaf import match_leaf
from .write_plan import named_leaves, NamedLeaf


_is_none = ft.partial(operator.is_, None)


# Faster than to call the class, as there may be 100,000.
_read: Callable[[tuple[Any, ...]], Read] = ft.partial(tuple.__new__, Read)


# What to do with such leaves, or a function of the name that says it.
Missing: TypeAlias = Literal["raise", "keep"] | Callable[[str], str]


Mismatched: TypeAlias = Literal["raise", "keep"] | Callable[[str], str]


Unexpected: TypeAlias = Literal["raise", "ignore"] | Callable[[str], str]


# The arguments that say what becomes of leaves that do not match.
Answered: TypeAlias = Literal["missing", "mismatched", "unexpected"]


@dataclass(frozen=True)
class ReadPlan:
    """What to read, what is known without reading, and how it agrees with `like`.

    Every leaf of `like`, by its position, is in `reads` or in `values`. Those of
    `reads` that a `transform` computes are in `parts` too. `kept` has those of `values`
    that the checkpoint lacks, or has otherwise, by name. `leaves`: what would become of
    each leaf, by name.
    """

    treedef: Any
    reads: Sequence[Read]
    values: Mapping[int, Any]
    kept: Mapping[str, Any]
    leaves: Mapping[str, LeafMatch]
    request: "Request"
    derived: Derived | None
    parts: Sequence[Part]

    def check(self) -> None:
        if problems_of(self.leaves):
            raise LeafMismatchError(explain(self.leaves, self.derived is not None))

    @property
    def nbytes(self) -> int:
        """The bytes to read."""
        direct = sum(
            [
                r.record.nbytes
                for r in self.reads
                if r.origin is None or not r.is_computed
            ]
        )
        return direct + sum(part.nbytes for part in self.parts)

    @property
    def direct(self) -> list[Read]:
        """What is read as it is, or joined: all but what is computed, or custom."""
        return [r for r in self.reads if r.spec is None and not r.is_computed]

    @property
    def custom(self) -> list[Read]:
        """What a custom `filter_spec` may read."""
        return [read for read in self.reads if read.spec is not None]

    @property
    def shardings(self) -> list[Sharding | None]:
        """The shardings of all leaves, and of what they are computed from."""
        placed = [sharding for part in self.parts for sharding in part.placed]
        made = self.kept.values() if self.request.initialises else ()
        placed += [x.sharding for x in made if isinstance(x, jax.ShapeDtypeStruct)]
        return [read.place.sharding for read in self.reads] + placed

    def filled(self, values: Mapping[int, Any]) -> PyTree:
        """The tree that is restored, with what was read, by position."""
        values = {**self.values, **values}
        return self.treedef.unflatten(values[i] for i in range(len(values)))


@dataclass(frozen=True)
class Request:
    """What a restore is asked for, apart from where it reads; see there."""

    like: PyTree
    filter_spec: PyTree = default_deserialise_filter_spec
    is_leaf: IsLeaf = None
    where: Callable[[PyTree], Any] | None = None
    prefix: str = ""
    sharding: PyTree = None
    casting: Casting = "no"
    missing: Missing = "raise"
    mismatched: Mismatched = "raise"
    unexpected: Unexpected = "raise"
    transform: Transform | None = None
    # Whether the caller computes the leaves that are kept without a value.
    initialises: bool = False

    def __post_init__(self) -> None:
        check_word("casting", self.casting, WORDS)
        for argument, words in _ANSWERS.items():
            if not callable(getattr(self, argument)):
                check_word(argument, getattr(self, argument), words)

    def answer(self, argument: Answered, name: str) -> str:
        """What `missing`, `mismatched` or `unexpected` says of a leaf."""
        said: Any = getattr(self, argument)
        if callable(said):
            said = said(name)
            check_word(f"{argument}({name!r})", said, _ANSWERS[argument])
        return said


_ANSWERS: Mapping[Answered, tuple[str, str]] = {
    "missing": ("raise", "keep"),
    "mismatched": ("raise", "keep"),
    "unexpected": ("raise", "ignore"),
}


# In these ways, a leaf of the checkpoint may differ from that of `like`.
_MISMATCHED = ("kind", "shape", "dtype")


def plan_reads(manifest: Manifest, request: Request) -> ReadPlan:
    like, is_leaf = request.like, stop_at_transients(request.is_leaf)
    leaves = list(named_leaves(like, request.filter_spec, is_leaf, "like"))
    prefix = checked_prefix(request.prefix, manifest, is_empty=not leaves)
    derived = None
    if request.transform is not None:
        derived = derive(manifest, prefix, request.transform)
        manifest, prefix = derived.manifest, ""
    named = leaves
    if prefix:
        named = [leaf._replace(name=below(prefix, leaf.name)) for leaf in leaves]
    if other := spelled(manifest, ((n.name, n.typed) for n in named), prefix):
        named = [leaf._replace(name=other.get(leaf.name, leaf.name)) for leaf in named]
    chosen: Collection[int] = range(len(named))
    if request.where is not None:
        chosen = chosen_by(request.where, like, is_leaf)
    targets = targets_of(request.sharding, like, is_leaf, len(named))
    reads: list[Read] = []
    values: dict[int, Any] = {}
    kept: dict[str, Any] = {}
    matches: dict[str, LeafMatch] = {}
    for index, leaf in enumerate(named):
        if index not in chosen and not request.initialises:
            values[index] = leaf.leaf
            continue
        record = manifest.leaves.get(leaf.name) if index in chosen else None
        value, becomes, origin = leaf.leaf, None, None
        if record is None:
            picked = index in chosen
            value, match = _missing(leaf, manifest, request, picked=picked)
        else:
            match, becomes, origin = _matched(leaf, record, request, derived)
        if record is None or becomes is None:
            if request.initialises:
                value, match = _to_initialise(value, match, leaf.name, targets[index])
            values[index] = kept[leaf.name] = value
            matches[leaf.name] = match
            continue
        where_to = ANYWHERE
        if match.is_harmless:
            match, where_to = _placed(match, leaf, becomes, targets[index])
            if origin is not None and origin.output is not None:
                where_to = where_to.left_to_xla
                origin = origin.going_to(where_to.target)
        matches[leaf.name] = match
        reads.append(_read((index, *leaf[:4], record, becomes, where_to, origin)))
    if request.where is None:
        extra = _unexpected({leaf.name for leaf in named}, manifest, prefix, request)
        if derived is not None:
            extra = {n: described(derived, m, n)[0] for n, m in extra.items()}
        matches |= extra
    if derived is not None:
        matches |= unreturned(derived, matches)
    matches |= _checked(named, reads, manifest)
    matches = _with_suggestions(matches, manifest)
    parts = [] if derived is None else parts_of(derived, reads)
    treedef = jtu.tree_structure(like, is_leaf)
    return ReadPlan(treedef, reads, values, kept, matches, request, derived, parts)


def _placed(
    match: LeafMatch, leaf: NamedLeaf, record: LeafRecord, target: Any
) -> tuple[LeafMatch, Place]:
    found = place(target, leaf.name, leaf.leaf, record)
    if leaf.spec is not None and found.problem:
        return match, Place(target)  # Its spec may not read it.
    # Not called for each leaf, as there may be 100,000.
    is_plain = not (found.problem or found.dropped)
    return match if is_plain else with_place(match, found), found


def _matched(
    leaf: NamedLeaf, record: LeafRecord, request: Request, derived: Derived | None
) -> tuple[LeafMatch, LeafRecord | None, Origin | None]:
    """A leaf beside its record, what that becomes, and what a `transform` did.

    It becomes `None` if the value of `like` is kept instead.
    """
    becomes: LeafRecord | None
    if leaf.spec is array_deserialise_filter_spec:
        # A Python number.
        match, becomes = match_leaf(leaf.leaf, None, record, request.casting)
        if match.status == "same" and record.value is not None:
            return match, becomes, None
        return match._replace(status="kept"), None, None
    match, becomes = match_leaf(leaf.leaf, leaf.spec, record, request.casting)
    origin = None
    is_mismatched = match.status in _MISMATCHED
    if derived is not None:
        match, origin = described(derived, match, leaf.name)
    if is_mismatched and request.answer("mismatched", leaf.name) == "keep":
        match, becomes = _kept(match, leaf, request), None
    return match, becomes, origin


def _kept(match: LeafMatch, leaf: NamedLeaf, request: Request) -> LeafMatch:
    """A leaf that keeps its value from `like`, if it has one."""
    has_value = not any(map(_has_no_value, jtu.tree_leaves(leaf.leaf)))
    is_kept = has_value or request.initialises
    return match._replace(status="kept" if is_kept else "abstract")


def _has_no_value(leaf: Any) -> bool:
    if isinstance(leaf, Tracer) or not isinstance(leaf, jax.Array):
        return isinstance(leaf, jax.ShapeDtypeStruct)
    return leaf.is_deleted()


def _to_initialise(
    value: Any, match: LeafMatch, name: str, target: Any
) -> tuple[Any, LeafMatch]:
    """A missing leaf that the caller computes: where it is to go."""
    expected = describe_like(value)
    if not isinstance(value, jax.ShapeDtypeStruct) or expected is None:
        return value, match
    kind = "jax" if expected.kind == "struct" else expected.kind
    found = place(target, name, value, expected._replace(kind=kind))
    struct = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=found.sharding)
    return struct, with_place(match, found)


def _missing(
    leaf: NamedLeaf, manifest: Manifest, request: Request, *, picked: bool
) -> tuple[Any, LeafMatch]:
    """A leaf that the checkpoint does not have, or that `where` does not pick."""
    if is_transient(leaf.leaf):
        return leaf.leaf.fresh(), _fresh(leaf.leaf)
    if picked:
        value, match = _without_record(leaf, manifest)
        is_missing = match.status == "missing"
        if is_missing and request.answer("missing", leaf.name) == "keep":
            match = _kept(match, leaf, request)
        return value, match
    now = describe_like(leaf.leaf) or fingerprint(leaf.leaf)
    return leaf.leaf, LeafMatch("kept", now, "nothing")


def _without_record(leaf: NamedLeaf, manifest: Manifest) -> tuple[Any, LeafMatch]:
    """The value and match of a leaf that the checkpoint does not have."""
    found = manifest.unsaved.get(leaf.name, "nothing")
    if leaf.spec is array_deserialise_filter_spec:
        return leaf.leaf, LeafMatch(
            "kept", describe_like(leaf.leaf) or "nothing", found
        )
    if leaf.spec is not None:
        return custom_without_record(leaf, leaf.spec, found)
    expected = describe_like(leaf.leaf)
    if expected is not None:
        return leaf.leaf, LeafMatch("missing", expected, found)
    return leaf.leaf, never_saved(leaf.leaf, found)


def _fresh(node: Transient) -> LeafMatch:
    """A node that is created anew, of which the checkpoint need not know."""
    return LeafMatch("same", node.note(), node.note())


def _checked(
    named: Sequence[NamedLeaf],
    reads: Sequence[Read],
    manifest: Manifest,
) -> dict[str, LeafMatch]:
    """The nodes that are created anew beside leaves that are restored."""
    transients = [leaf for leaf in named if is_transient(leaf.leaf)]
    found: dict[str, LeafMatch] = {}
    if not transients:
        return found
    nodes = {_node(named[read.position]) for read in reads}
    for leaf in transients:
        if _node(leaf) in nodes:
            note = note_in(manifest.unsaved.get(leaf.name)) or "no settings"
            status = "same" if leaf.leaf.accepts(note) else "loader"
            found[leaf.name] = LeafMatch(status, leaf.leaf.note(), note)
    return found


def _node(leaf: NamedLeaf) -> TypedPath:
    """The node that a leaf of `like` is in."""
    return leaf.typed[:-1]


def _unexpected(
    known: Collection[str], manifest: Manifest, prefix: str, request: Request
) -> dict[str, LeafMatch]:
    """What `like` has in place of leaves: `None`, if it was partitioned."""
    names = [
        name
        for name in manifest.leaves
        if name not in known and (not prefix or is_below(prefix, name))
    ]
    absent: set[str] = set()
    if names and any(map(_is_none, jtu.tree_leaves(request.like, _is_none))):
        nodes = key_paths(request.like, _is_none)
        absent = {below(prefix, encode(typed(path))) for path, x in nodes if x is None}
    refuses, leaves = request.unexpected == "raise", manifest.leaves
    return {
        name: LeafMatch(
            "unexpected"
            if refuses or request.answer("unexpected", name) == "raise"
            else "ignored",
            "`None`" if name in absent else "nothing",
            leaves[name],
        )
        for name in names
    }


def _with_suggestions(
    matches: dict[str, LeafMatch], manifest: Manifest
) -> dict[str, LeafMatch]:
    missing = [n for n, m in matches.items() if m.status == "missing"]
    if not missing:
        return matches
    unmatched = [n for n, m in matches.items() if m.status == "unexpected"]
    names = unmatched or [n for n in manifest.leaves if n not in matches]
    nearest = similar(missing, names)
    for name, others in nearest.items():
        # Faster than `_replace`, as there may be 100,000.
        m = matches[name]
        matches[name] = LeafMatch(
            m.status, m.expected, m.found, others, m.replicated, m.origin, m.computed
        )
    return matches
