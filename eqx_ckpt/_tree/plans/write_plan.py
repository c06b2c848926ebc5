"""Which leaves are compressed; by default, none."""

import functools as ft
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import equinox as eqx
from jaxtyping import PyTree

from ..._errors import CheckpointError, LeafMismatchError, warn
from ..._format.chunk_grid import Start
from ..._format.leaf_record import CannotSave, LeafRecord
from ..._format.manifest import check_array, COMPRESSIONS
from ..._format.run_history import History, Part
from ..._storage.interface.chunk_bytes import Piece
from ..._types import check_function, IsLeaf, KeyPath, shown, Spec, TypedPath, wrong
from ..leaves.filter_spec import (
    array_deserialise_filter_spec,
    checked_specs,
    default_deserialise_filter_spec,
    default_serialise_filter_spec,
    is_number,
    LeafWriter,
    saved_by,
)
from ..leaves.frozen_spec import frozen_flags
from ..leaves.key_paths import check_distinct, key_paths, Namer
from ..leaves.leaf_data import chunk_positions, shards
from ..leaves.leaf_kinds import describe, fingerprint
from ..leaves.transient import is_transient, marked
from ..leaves.tree_prefix import fit_prefix
from ..leaves.unsaved_state import STATIC, warn_of_state


Codec: TypeAlias = Literal["zstd"] | None


Compression: TypeAlias = Codec | Callable[[str, LeafRecord], Codec]


"""`"zstd"`, `None`, or a function `(name, record)` that returns one of them."""


def check_compression(compression: Compression) -> None:
    if not callable(compression) and compression not in (None, *COMPRESSIONS):
        raise wrong(compression, str)(
            f"`compression` is {shown(compression)}. Pass 'zstd', `None`, or a "
            "function `(name, record)` that returns one of them."
        )


class Write(NamedTuple):
    """One leaf to be saved; `leaf` holds its data, and is `None` for a scalar.

    `owned`: the starts of the pieces that this process writes; `None`: all.
    """

    name: str
    record: LeafRecord
    leaf: Any
    owned: Collection[Start] | None = None

    def pieces(self) -> Iterator[Piece]:
        """What this process writes of it; its copy to the host begins at once."""
        found = shards(self.leaf, self.record, owned=self.owned)
        return (
            Piece(self.name, self.record, region, array)
            for region, array in found
            if array.size
        )

    def positions(self) -> set[int] | None:
        """Of the chunks that this process writes; `None`: all of them."""
        if self.owned is None:
            return None
        return chunk_positions(self.leaf, self.record, self.owned)


def compressed(writes: list[Write], compression: Compression) -> list[Write]:
    """The writes, with the compression of each leaf in its record."""
    check_compression(compression)
    found: list[Write] = []
    problems: list[str] = []
    for write in writes:
        if write.leaf is not None:
            name, record = write.name, write.record
            codec = compression(name, record) if callable(compression) else compression
            if codec not in (None, *COMPRESSIONS):
                problems.append(f"- {name!r}: {codec!r}.")
            write = write._replace(record=record._replace(compression=codec))
        found.append(write)
    if problems:
        raise CheckpointError(
            "These leaves cannot be compressed so:\n"
            + "\n".join(problems)
            + "\nPass `'zstd'`, `None`, or a function `(name, record)` that returns "
            "one of them."
        )
    return found


# This many numbers in one list take about as long to save as a large model.
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


def named_leaves(
    tree: PyTree, filter_spec: PyTree, is_leaf: IsLeaf, argument: str
) -> Iterator[NamedLeaf]:
    """Every leaf with the function of `filter_spec` for it, in the order of leaves."""
    if is_leaf is not None:
        check_function("is_leaf", is_leaf)
    try:
        specs = checked_specs(filter_spec)
        _, nodes = fit_prefix(filter_spec, tree, is_leaf)
    except ValueError as e:
        raise LeafMismatchError(
            f"`filter_spec` does not fit `{argument}`, or is not a PyTree: {e} Pass "
            "one function `(f, leaf)` for all leaves, or a PyTree of such functions "
            f"whose structure is that of the upper part of `{argument}`."
        ) from e
    name_of = Namer()
    for (path, spec), node in zip(specs, nodes, strict=True):
        custom = None if any(spec is default for default in _DEFAULTS) else spec
        try:
            found = key_paths(node, is_leaf)
        except ValueError as e:
            raise LeafMismatchError(
                f"JAX cannot flatten `{argument}`. Does a dictionary in it have keys "
                f"of several types? {e}"
            ) from e
        for rest, leaf in found:
            whole = (*path, *rest) if path else rest
            chosen = None if custom is None else _chosen(custom, leaf)
            name, as_data = name_of(whole)
            yield _named((name, whole, leaf, chosen, as_data))


# Faster than to call the class, as there may be 100,000.
_named = ft.partial(tuple.__new__, NamedLeaf)


def _chosen(custom: Spec, leaf: Any) -> Spec | None:
    """The function of `filter_spec` for a leaf, if it is for such leaves."""
    is_for_numbers = custom is array_deserialise_filter_spec
    if is_transient(leaf) or (is_for_numbers and not is_number(leaf)):
        return None
    return custom


class WritePlan(NamedTuple):
    """The writes, and the fingerprints of the leaves that are not saved.

    `separators` are those of the source of a copy, and `history` is that of the step.
    `frozen` has the names of the arrays that are said not to change. `part` says which
    part of a step it is; then `leaf_of` has the leaf of each array.
    """

    writes: list[Write]
    unsaved: dict[str, str]
    separators: str | None = None
    history: History | None = None
    frozen: Collection[str] = ()
    part: Part | None = None
    leaf_of: Mapping[str, str] = {}


def plan_writes(
    pytree: PyTree,
    filter_spec: PyTree,
    is_leaf: IsLeaf,
    frozen: PyTree = None,
    compression: Compression = None,
) -> WritePlan:
    """Plan a save; report every leaf that cannot be saved in one error."""
    leaves = list(named_leaves(pytree, filter_spec, is_leaf, "pytree"))
    names: set[str] = set()
    if frozen is not None:
        flags = frozen_flags(frozen, pytree, is_leaf)
        names = {leaf.name for leaf, flag in zip(leaves, flags, strict=True) if flag}
    writes: list[Write] = []
    saved: list[tuple[KeyPath, str]] = []
    unsaved: dict[str, str] = {}
    suspects: dict[str, Any] = {}
    problems: list[str] = []
    for name, path, leaf, spec, keys in leaves:
        if is_transient(leaf):
            unsaved[name] = marked(leaf)
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
            unsaved[name] = fingerprint(leaf)
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
    check_distinct(saved)
    if suspects:
        warn_of_state(suspects)
    if len(writes) > _MANY:
        _warn_of_numbers(writes)
    if compression is not None:
        writes = compressed(writes, compression)
    return WritePlan(writes, unsaved, frozen=names)


def _warn_of_numbers(writes: Sequence[Write]) -> None:
    """Warn of a long list of Python numbers: each of them is a leaf."""
    lists = Counter(
        w.name.rpartition("/")[0] for w in writes if w.record.value is not None
    )
    for name, count in lists.items():
        if count > _MANY:
            warn(
                f"{name or '@root'!r} has {count} Python numbers. Each is saved "
                "as a leaf of its own, which is slow. Keep them in one array, such as "
                "`np.array(history)`, which is one leaf."
            )
