"""Plan, then act: every problem is found here, before a byte is written or read."""

import functools as ft
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._errors import CheckpointError, LeafMismatchError, LeafNameError
from .._format.chunks import Start
from .._format.leaves import (
    CannotSave,
    describe,
    describe_like,
    LeafRecord,
    scalar_to_text,
)
from .._format.manifest import check_array, fingerprint, Manifest
from .._format.names import (
    below,
    distinct,
    encode,
    folders,
    is_below,
    key_paths,
    Namer,
    stored_names,
    typed,
)
from .._format.parse import scalar_from_text
from .._format.transient import is_transient, stop_at_transients
from .._types import IsLeaf, KeyPath, Spec, TypedPath
from .filter_spec import (
    default_deserialise_filter_spec,
    default_serialise_filter_spec,
    LeafReader,
    LeafWriter,
    restored_by,
    saved_by,
)
from .match import did_you_mean, difference, explain, LeafMatch, Match, with_place
from .sharding import Place, place, targets_of
from .similar import Index, similar
from .state import STATIC, warn_of_state
from .where import chosen_by


# So many numbers in one list take about as long as a large model.
_MANY = 10_000
_is_none = ft.partial(operator.is_, None)
_DEFAULTS = (
    default_serialise_filter_spec,
    default_deserialise_filter_spec,
    eqx.default_serialise_filter_spec,
    eqx.default_deserialise_filter_spec,
)


class NamedLeaf(NamedTuple):
    """A leaf, its place in the tree, and its name in the checkpoint.

    `spec` is its part of `filter_spec`, and `None` for the default one;
    `typed` is `path` as data.
    """

    name: str
    path: KeyPath
    leaf: Any
    spec: Spec | None
    typed: TypedPath = ()


def _named(
    tree: PyTree, filter_spec: PyTree, is_leaf: IsLeaf, argument: str
) -> Iterator[NamedLeaf]:
    """Every leaf with the function of `filter_spec` for it, in the order of leaves."""
    try:
        specs = key_paths(filter_spec)
        name_of = Namer()
        nodes = jtu.tree_structure(filter_spec).flatten_up_to(tree)
        for (path, spec), node in zip(specs, nodes, strict=True):
            if not callable(spec):
                raise ValueError(f"it has {spec!r} at `{jtu.keystr(path)}`.")
            custom = None if any(spec is default for default in _DEFAULTS) else spec
            for rest, leaf in key_paths(node, is_leaf):
                whole = (*path, *rest) if path else rest
                chosen = None if is_transient(leaf) else custom
                name, as_data = name_of(whole)
                yield NamedLeaf(name, whole, leaf, chosen, as_data)
    except LeafNameError:
        raise
    except ValueError as e:
        raise LeafMismatchError(
            f"`filter_spec` does not fit `{argument}`, or that is no PyTree: {e} Pass "
            "one function `(f, leaf)` for all leaves, or a PyTree of such functions "
            f"whose structure is that of the upper part of `{argument}`."
        ) from e


class Write(NamedTuple):
    """One leaf to be saved; `leaf` holds its data, and is `None` for a scalar.

    `owned` is where the pieces of it begin that this process writes; `None`: all.
    """

    name: str
    record: LeafRecord
    leaf: Any
    owned: Collection[Start] | None = None


class WritePlan(NamedTuple):
    """What to write, and the fingerprints of the leaves that are not saved."""

    writes: list[Write]
    others: dict[str, str]


def plan_writes(pytree: PyTree, filter_spec: PyTree, is_leaf: IsLeaf) -> WritePlan:
    """What a save writes; every leaf that cannot be saved, in one error."""
    writes: list[Write] = []
    saved: list[tuple[KeyPath, str]] = []
    others: dict[str, str] = {}
    suspects: dict[str, Any] = {}
    problems: list[str] = []
    for name, path, leaf, spec, keys in _named(pytree, filter_spec, is_leaf, "pytree"):
        if is_transient(leaf):
            others[name] = leaf.note()
            continue
        try:
            if spec is not None:
                leaf = saved_by(spec, LeafWriter(name, path), leaf)
            record = describe(leaf)
            if record is not None and record.value is None:
                check_array(record)
        except CannotSave as e:
            problems.append(f"- {name!r} {e}.")
            continue
        if record is None:
            others[name] = fingerprint(leaf)
            if not isinstance(leaf, STATIC):
                suspects[name] = leaf
        else:
            record = record._replace(path=keys)
            data = leaf if record.value is None else None
            writes.append(Write(name, record, data))
            saved.append((path, name))
    if problems:
        raise CheckpointError(
            "Nothing was saved, because these leaves cannot be:\n"
            + "\n".join(problems)
            + "\nConvert them, or leave them out with a `filter_spec`."
        )
    stored = distinct(saved)
    if stored:
        writes = [w._replace(name=stored.get(w.name, w.name)) for w in writes]
    if suspects:
        warn_of_state(suspects)
    if len(writes) > _MANY:
        _warn_of_numbers(writes)
    return WritePlan(writes, others)


def _warn_of_numbers(writes: Sequence[Write]) -> None:
    """Warn of a long list of Python numbers: each of them is a leaf of its own."""
    lists = Counter(
        w.name.rpartition("/")[0] for w in writes if w.record.value is not None
    )
    for name, count in lists.items():
        if count > _MANY:
            warnings.warn(
                f"{name or '@root'!r} has {count} Python numbers. Each is saved "
                "as a leaf of its own, which is slow. Keep them in one array, such as "
                "`np.array(history)`, which is one leaf.",
                stacklevel=2,
            )


class Read(NamedTuple):
    """One leaf to be restored, at `position` among the leaves of `like`."""

    position: int
    name: str
    path: KeyPath
    like: Any
    spec: Spec | None
    record: LeafRecord
    place: Place


@dataclass(frozen=True)
class ReadPlan:
    """What to read, what is known without reading, and how it agrees with `like`.

    Every leaf of `like`, by its position, is in `reads` or in `values`.
    """

    treedef: Any
    reads: Sequence[Read]
    values: Mapping[int, Any]
    match: Match

    def check(self) -> None:
        if not self.match.ok:
            raise LeafMismatchError(explain(self.match))

    def filled(self, values: Mapping[int, Any]) -> PyTree:
        """The tree that is restored, with what was read, by position."""
        values = {**self.values, **values}
        return self.treedef.unflatten(values[i] for i in range(len(values)))


def plan_reads(
    manifest: Manifest,
    like: PyTree,
    filter_spec: PyTree,
    is_leaf: IsLeaf,
    *,
    where: Callable[[PyTree], Any] | None,
    prefix: str,
    sharding: PyTree,
) -> ReadPlan:
    is_leaf = stop_at_transients(is_leaf)
    leaves = list(_named(like, filter_spec, is_leaf, "like"))
    prefix = checked_prefix(prefix, manifest, is_empty=not leaves)
    stored = stored_names(manifest.leaves)
    named = leaves
    if prefix or stored:
        named = [
            leaf._replace(name=stored.get(name, name))
            for leaf in leaves
            for name in [below(prefix, leaf.name)]
        ]
    everything = range(len(named))
    chosen = everything if where is None else chosen_by(where, like, is_leaf)
    targets = targets_of(sharding, like, is_leaf, len(named))
    reads: list[Read] = []
    values: dict[int, Any] = {}
    matches: dict[str, LeafMatch] = {}
    for index, leaf in enumerate(named):
        if index not in chosen:
            values[index] = leaf.leaf
            continue
        record = manifest.leaves.get(leaf.name)
        if record is None:
            values[index], matches[leaf.name] = _without_record(leaf, manifest)
            continue
        match = match_leaf(leaf.leaf, leaf.spec, record)
        where_to = Place(None)
        if match.status == "same":
            where_to = place(targets[index], leaf.name, leaf.leaf, record)
            match = with_place(match, where_to)
        reads.append(Read(index, *leaf[:4], record, where_to))
        matches[leaf.name] = match
    if where is None:
        known = {leaf.name for leaf in named}
        unexpected = [
            name
            for name in manifest.leaves
            if name not in known and (not prefix or is_below(prefix, name))
        ]
        matches |= _unexpected(unexpected, manifest, prefix, like)
    nbytes = sum(r.record.nbytes for r in reads)
    match = Match(_with_suggestions(matches, manifest), nbytes)
    return ReadPlan(jtu.tree_structure(like, is_leaf), reads, values, match)


def checked_prefix(prefix: Any, manifest: Manifest, *, is_empty: bool = False) -> str:
    """`prefix` as a name of the checkpoint; `is_empty`: nothing is wanted from there.

    A part without a leaf, such as an `eqx.nn.Identity`, is known by what it is in.
    """
    if not isinstance(prefix, str):
        raise LeafMismatchError(
            f"`prefix` is {prefix!r}, which is no string. Pass the beginning of a "
            'name, such as `prefix="model/layers/0"`; `""` is the whole checkpoint.'
        )
    prefix = prefix.strip("/")
    if not prefix:
        return prefix
    prefix = stored_names(manifest.leaves).get(prefix, prefix)
    sought = prefix.rpartition("/")[0] if is_empty else prefix
    names = [*manifest.leaves, *manifest.others]
    if not sought or any(is_below(sought, name) for name in names):
        return prefix
    nearest = Index(folders(names).union(names)).nearest(prefix)
    raise LeafMismatchError(
        f"`prefix` is {prefix!r}, and the checkpoint has no leaf of that name or below "
        f"it.{did_you_mean(nearest)}"
    )


def _without_record(leaf: NamedLeaf, manifest: Manifest) -> tuple[Any, LeafMatch]:
    """The value and match of a leaf that the checkpoint does not have."""
    if is_transient(leaf.leaf):
        note = leaf.leaf.note()
        found = manifest.others.get(leaf.name, note)
        status = "same" if leaf.leaf.accepts(found) else "kind"
        return leaf.leaf.fresh(), LeafMatch(status, note, found)
    expected = describe_like(leaf.leaf)
    now = expected or fingerprint(leaf.leaf)
    found = manifest.others.get(leaf.name, "nothing")
    if leaf.spec is not None:
        f = LeafReader(leaf.name, leaf.path, _not_there, _unless_saved)
        try:
            return restored_by(leaf.spec, f, leaf.leaf), LeafMatch("same", now, found)
        except _NotThere:
            return leaf.leaf, LeafMatch("missing", now, found)
    if expected is not None:
        return leaf.leaf, LeafMatch("missing", now, found)
    same = found in (now, "nothing") or found.startswith("skipped: ")
    return leaf.leaf, LeafMatch("same" if same else "changed", now, found)


def _not_there() -> bytes:
    raise _NotThere


def _unless_saved(leaf: Any) -> Any:
    """What the default spec restores where there is nothing."""
    if describe_like(leaf) is not None:
        raise _NotThere
    return leaf


class _NotThere(LeafMismatchError):
    pass


def match_leaf(like: Any, spec: Spec | None, record: LeafRecord) -> LeafMatch:
    """A leaf of `like` beside its record; a custom `filter_spec` decides for itself."""
    expected = describe_like(like)
    if spec is not None:
        return LeafMatch("same", expected or fingerprint(like), record)
    if expected is None:
        return LeafMatch("kind", fingerprint(like), record)
    status = difference(expected, record)
    if status == "same" and record.value is not None:
        try:
            number_like(like, record)
        except ValueError as e:
            return LeafMatch("kind", str(e), record)
    return LeafMatch(status, expected, record)


def number_like(like: Any, record: LeafRecord) -> Any:
    """A Python number; a subclass, such as an `IntEnum`, is made again from it.

    `ValueError` if it cannot be, or would be another number.
    """
    value = scalar_from_text(record.kind, record.value or "")
    kind = type(like)
    if kind is type(value):
        return value
    try:
        made = kind(value)
        if scalar_to_text(made) == record.value:
            return made
        problem = f"it makes {made!r}"
    except Exception as e:
        problem = str(e)
    raise ValueError(f"`{kind.__name__}` (which {value!r} is not: {problem})")


def _unexpected(
    names: Collection[str], manifest: Manifest, prefix: str, like: PyTree
) -> dict[str, LeafMatch]:
    """What `like` has in place of leaves: `None`, if it was partitioned."""
    absent: set[str] = set()
    if names and any(map(_is_none, jtu.tree_leaves(like, _is_none))):
        nodes = key_paths(like, _is_none)
        absent = {below(prefix, encode(typed(path))) for path, x in nodes if x is None}
    leaves = manifest.leaves
    return {
        name: LeafMatch(
            "unexpected", "`None`" if name in absent else "nothing", leaves[name]
        )
        for name in names
    }


def _with_suggestions(
    matches: dict[str, LeafMatch], manifest: Manifest
) -> dict[str, LeafMatch]:
    missing = [n for n, m in matches.items() if m.status == "missing"]
    if not missing:
        return matches
    unmatched = {n for n, m in matches.items() if m.status == "unexpected"}
    names = unmatched or manifest.leaves.keys() - matches.keys()
    suggestions = {
        name: matches[name]._replace(nearest=nearest)
        for name, nearest in similar(missing, names).items()
    }
    return matches | suggestions
