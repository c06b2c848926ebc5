"""What a `transform` returns for a checkpoint, found before anything is read."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..._errors import CheckpointError, LeafMismatchError, LeafNameError
from ..._format.chunk_grid import chunk_shape
from ..._format.dtype_names import OF_JAX
from ..._format.leaf_names import below, from_below, is_below
from ..._format.leaf_record import CannotSave, dtype_from_tag, key_shape, LeafRecord
from ..._format.manifest import Manifest
from ..._types import KeyPath, shown
from ..leaves.casting import would_narrow
from ..leaves.key_paths import check_distinct, key_paths, Namer
from ..leaves.leaf_kinds import describe, describe_like, fingerprint
from ..leaves.transient import is_transient, marked, moved_notes
from ..leaves.unsaved_state import STATIC
from ..matching.leaf_match import LeafMatch, UNRETURNED
from ..matching.name_tree import nested, struct_of
from ..matching.similar_names import similar
from .arrangement import View
from .input_views import view_name, view_record, whole_view
from .transform_trace import Traced


# A function from the leaves of a checkpoint, see `tree_like`, to those for `like`.
Transform = Callable[[PyTree], PyTree]


_SHOWN = 10


_USES_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerBoolConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class Origin(NamedTuple):
    """Where a leaf comes from that a `transform` returned.

    `names`: the leaves of the checkpoint that it is, or is computed from.
    `output`: if it is computed, its number among what is.
    `value`: if it was there at once, such as a NumPy array.
    `is_joined`: whether it is these leaves, one after another along its first axis.
    """

    names: tuple[str, ...] = ()
    output: int | None = None
    value: Any = None
    is_joined: bool = False

    @property
    def is_made(self) -> bool:
        """Whether it is computed, not a leaf of the checkpoint."""
        return self.output is not None or not self.names

    def going_to(self, target: Any) -> "Origin":
        """The same, without an `output` if it is read directly to its place.

        On a mesh, XLA shards what is joined as the leaves that it is computed from.
        """
        is_read = self.is_joined and not isinstance(target, Mesh)
        return self._replace(output=None) if is_read else self


@dataclasses.dataclass(frozen=True)
class Derived:
    """A checkpoint as a `transform` shows it.

    `manifest`: the leaves that it returned.
    `origins`: where each array of them comes from.
    `inputs`: the arrays of the checkpoint, and the parts of them that are read without
    the rest, in the order of the inputs of `traced`.
    `views`: by the name of such a part, the name of its leaf, and which part it is.
    """

    manifest: Manifest
    origins: Mapping[str, Origin]
    inputs: Mapping[str, LeafRecord]
    views: Mapping[str, tuple[str, View]]
    traced: Traced
    prefix: str

    def leaves_of(self, origin: Origin) -> list[str]:
        """The leaves of the checkpoint that something comes from, wholly or in part."""
        return [self.views[n][0] if n in self.views else n for n in origin.names]


def described(
    derived: Derived, match: LeafMatch, name: str
) -> tuple[LeafMatch, Origin | None]:
    """A match with the origin of the leaf."""
    origin = derived.origins.get(name)
    if origin is None:
        return match, None
    before = below(derived.prefix, name)
    if not origin.is_made and origin.names[0] == before:
        return match, origin
    match = match._replace(origin=origin.names, computed=origin.is_made)
    if problem := _obstacle(derived, origin):
        match = match._replace(status="dtype", found=problem)
    elif match.status == "same":
        match = match._replace(status="computed" if origin.is_made else "renamed")
    return match, origin


def unreturned(
    derived: Derived, matches: Mapping[str, LeafMatch]
) -> dict[str, LeafMatch]:
    """The matches of leaves that `like` has, but not what a `transform` returned.

    They say what the checkpoint has of similar names, if that is not used.
    """
    absent = [
        name
        for name, match in matches.items()
        if match.status in ("missing", "abstract", "kept") and match.found == "nothing"
    ]
    used = {n for origin in derived.origins.values() for n in derived.leaves_of(origin)}
    left = [
        from_below(derived.prefix, name)
        for name in derived.inputs
        if name not in used and name not in derived.views
    ]
    nearest = similar(absent, left)
    found: dict[str, LeafMatch] = {}
    for name in absent:
        origin = tuple(below(derived.prefix, other) for other in nearest.get(name, ()))
        found[name] = matches[name]._replace(found=UNRETURNED, origin=origin)
    return found


def _obstacle(derived: Derived, origin: Origin) -> str:
    """Why a leaf cannot be computed; nothing if it can be, or need not be."""
    for name in origin.names if origin.output is not None else ():
        if problem := _uncomputable(derived.inputs[name]):
            return f"{derived.inputs[name]} of {name!r}, which {problem}"
    return ""


def _uncomputable(record: LeafRecord) -> str:
    if record.kind == "key":
        return ""
    if would_narrow(record.dtype):
        return (
            "JAX would narrow: use `jax.enable_x64(True)`, or return it as it is, and "
            "let `casting` cast it"
        )
    if dtype_from_tag(record.dtype).kind in "mM":
        return "JAX cannot compute with: return it as it is"
    return ""


def derive(manifest: Manifest, prefix: str, transform: Any) -> Derived:
    """Call a `transform` with the leaves below a prefix, without their data."""
    if not callable(transform):
        raise TypeError(
            f"`transform` is {shown(transform)}. Pass a function from what `tree_like` "
            "shows of the checkpoint to the tree that `like` is compared with."
        )
    records = {n: r for n, r in manifest.leaves.items() if is_below(prefix, n)}
    inputs = {name: record for name, record in records.items() if record.is_array}
    returned: list[tuple[KeyPath, Any]] = []

    def run(*arrays: Any) -> list[Any]:
        given = dict(zip(inputs, arrays, strict=True))
        tree = nested(
            manifest, prefix, lambda n, r: given[n] if r.is_array else struct_of(r)
        )
        leaves = _called(transform, tree, [*records])
        # Tracers must not outlive the trace.
        returned.extend((path, _Output.of(leaf)) for path, leaf in leaves)
        return [leaf for _, leaf in leaves if isinstance(leaf, Tracer)]

    # Many arrays share one type, because JAX takes long to create each type.
    seen = {record[:5]: record for record in inputs.values()}
    # Those of 64 bits, too: a cast in a `transform` is a cast while x64 is off.
    with jax.enable_x64(True):
        types = {key: jax.typeof(struct_of(record)) for key, record in seen.items()}
    with warnings.catch_warnings():
        if any(would_narrow(record.dtype) for record in inputs.values()):
            # A leaf that is computed from them is refused, if it is needed.
            warnings.filterwarnings("ignore", "Explicitly requested dtype")
        traced = Traced(
            run,
            [types[record[:5]] for record in inputs.values()],
            [whole_view(i, record) for i, record in enumerate(inputs.values())],
        )
    if traced.effects:
        raise LeafMismatchError(
            f"`transform` has effects: it uses `{'`, `'.join(traced.effects)}`. It has "
            "to be a pure function: only a part of it may be computed, in parts."
        )
    if records and not returned:
        raise LeafMismatchError(
            "`transform` returned no leaf. It has to return all leaves that `like` "
            "has: does it lack a `return`?"
        )
    views = _views(traced, inputs)
    known = inputs | {
        name: view_record(view, inputs[leaf]) for name, (leaf, view) in views.items()
    }
    made, unsaved = _made(returned, traced, known)
    derived = Derived(
        manifest,
        {name: origin for name, (_, origin) in made.items() if origin is not None},
        known,
        views,
        traced,
        prefix,
    )
    leaves = {name: record for name, (record, _) in made.items()}
    unsaved = _moved(derived) | unsaved
    seen = dataclasses.replace(manifest, leaves=leaves, unsaved=unsaved)
    return dataclasses.replace(derived, manifest=seen)


def _views(
    traced: Traced, inputs: Mapping[str, LeafRecord]
) -> dict[str, tuple[str, View]]:
    """The parts of leaves that are inputs of their own, by name."""
    named = [*inputs.items()]
    views: dict[str, tuple[str, View]] = {}
    for view in traced.inputs[len(inputs) :]:
        name, record = named[view.input]
        views[view_name(view, name, record)] = name, view
    return views


def _moved(derived: Derived) -> dict[str, str]:
    """What was not saved, with the notes where the leaves beside them went."""
    prefix, unsaved = derived.prefix, derived.manifest.unsaved
    return moved_notes(
        {from_below(prefix, n): x for n, x in unsaved.items() if is_below(prefix, n)},
        (
            (name, [from_below(prefix, n) for n in derived.leaves_of(origin)])
            for name, origin in derived.origins.items()
        ),
    )


def _called(
    transform: Transform, tree: PyTree, names: Sequence[str]
) -> list[tuple[KeyPath, Any]]:
    try:
        return key_paths(transform(tree))
    except CheckpointError:
        raise
    except _USES_VALUES as e:
        raise LeafMismatchError(
            "`transform` uses the value of an array. It is called once, before "
            "anything is read, with arrays that have a shape and a dtype, but no "
            "values yet. Use `jnp.where` or `jax.lax.cond` in place of `if`, and "
            f"`jax.numpy` in place of NumPy. JAX says: {_first_line(e)}"
        ) from e
    except Exception as e:
        first = ", ".join(map(repr, names[:_SHOWN]))
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise LeafMismatchError(
            f"`transform` raised `{type(e).__name__}`: {_first_line(e)} It is called "
            f"with nested dictionaries of these leaves, as `tree_like` shows them: "
            f"{first}{more}."
        ) from e


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") + "."


class _Output(NamedTuple):
    """Stands for a traced array that a `transform` returned."""

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """This for a tracer; another leaf is returned as it is."""
        is_traced = isinstance(leaf, Tracer)
        return cls(leaf.shape, leaf.dtype, leaf.weak_type) if is_traced else leaf


_Made = dict[str, tuple[LeafRecord, Origin | None]]


def _made(
    returned: Sequence[tuple[KeyPath, Any]],
    traced: Traced,
    inputs: Mapping[str, LeafRecord],
) -> tuple[_Made, dict[str, str]]:
    """Each leaf with its record and its origin, and the leaves that are not data."""
    made: _Made = {}
    unsaved: dict[str, str] = {}
    named: list[tuple[KeyPath, str]] = []
    problems: list[str] = []
    named_inputs = [*inputs.items()]
    name_of = Namer()
    output = 0
    for path, leaf in returned:
        name, keys = name_of(path)
        if is_transient(leaf):
            unsaved[name] = marked(leaf)
            continue
        try:
            if isinstance(leaf, _Output):
                record, origin = _of_output(output, leaf, traced, named_inputs)
                output += 1
            else:
                record, origin = _of_value(leaf)
        except CannotSave as e:
            problems.append(f"- {name!r} {e}.")
            continue
        if record is None:
            unsaved[name] = fingerprint(leaf)
        else:
            made[name] = record._replace(path=keys), origin
            named.append((path, name))
    if problems:
        raise LeafMismatchError(
            "`transform` returned leaves that are neither arrays that can be restored, "
            "nor Python numbers:\n" + "\n".join(problems)
        )
    _check_distinct(named)
    return made, unsaved


def _check_distinct(named: Sequence[tuple[KeyPath, str]]) -> None:
    try:
        check_distinct(named)
    except LeafNameError as e:
        raise LeafNameError(f"What `transform` returned: {e}") from e


def _of_output(
    output: int,
    leaf: _Output,
    traced: Traced,
    inputs: Sequence[tuple[str, LeafRecord]],
) -> tuple[LeafRecord, Origin]:
    """A leaf that the checkpoint has, or one that is computed."""
    same = traced.unchanged(output)
    if same is not None:
        name, record = inputs[same]
        return record, Origin((name,))
    record = describe_like(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    if record is None or record.kind == "unknown":
        raise CannotSave(f"has the dtype `{leaf.dtype}`, which no leaf has")
    if record.kind == "key":
        shape = (*leaf.shape, *(key_shape(record.impl or "") or ()))
        chunk = chunk_shape(shape, shape, 4)
        record = record._replace(
            data_type="uint32", data_shape=shape, chunk_shape=chunk
        )
    else:
        if record.dtype not in OF_JAX:
            raise CannotSave(
                f"is computed, and has the dtype `{record.dtype}`, which JAX does not "
                "compute with: return the leaf as it is, or cast it first"
            )
        record = LeafRecord.of_array(leaf.shape, leaf.dtype, path=())
        record = record._replace(weak_type=leaf.weak_type)
    joined = traced.joined(output)
    types = {(inputs[i][1].dtype, inputs[i][1].data_type) for i in joined}
    is_joined = types == {(record.dtype, record.data_type)}
    used = joined if is_joined else traced.inputs_of(output)
    return record, Origin(tuple(inputs[i][0] for i in used), output, None, is_joined)


def _of_value(leaf: Any) -> tuple[LeafRecord | None, Origin | None]:
    """A leaf that is there already, such as a NumPy array or a Python number."""
    record = describe(leaf)
    if record is None and not (isinstance(leaf, STATIC) or callable(leaf)):
        raise CannotSave(f"is a `{type(leaf).__name__}`")
    if record is None or not record.is_array:
        return record, None
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise CannotSave("has parts on devices of other processes")
    return record, Origin(value=leaf)
