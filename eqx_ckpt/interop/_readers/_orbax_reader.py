"""Checkpoints of Orbax, read through TensorStore, without Orbax."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..._errors import CheckpointError, CheckpointNotFoundError
from ..._format.leaf_names import encode
from ..._format.leaf_record import CannotSave, key_shape, LeafRecord, scalar_to_text
from ..._format.source import RegionRead
from ..._sources.foreign_zarr import Place, read_zarr, ZarrArray
from ..._storage.calls.store_path import StorePath
from ..._types import check_optional_integer, check_text, PathLike, TypedPath
from ._foreign_records import (
    array_record,
    corrupt,
    is_unicode,
    manifest_of,
    Named,
    parse_object,
    position_or_key,
)
from ._zarr_source import check_arrays, ZarrSource


FORMAT = "checkpoint of Orbax"


_METADATA, _STEP_METADATA = "_METADATA", "_CHECKPOINT_METADATA"


_COMMITTED, _TEMPORARY = "commit_success.txt", ".orbax-checkpoint-tmp"


_STEP = re.compile(r"(?:(.+)_)?(\d{1,18})")


# Of the files in a folder, those that only steps have.
_IN_STEP = re.compile(r"_CHECKPOINT_METADATA|[^/]+/_METADATA")


_MAX_METADATA = 2**26


_MAX_PROCESSES = 100_000


# A `key_type`; that of a sequence is 1.
_OF_DICTIONARY = 2


# In place of empty containers, which have no leaves.
_EMPTY = ("None", "Dict", "List", "Tuple", "NamedTuple")


_KINDS = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}


def open_orbax(
    path: PathLike, *, step: int | None = None, item: str | None = None
) -> ZarrSource:
    """Open a PyTree that Orbax has saved.

    Only metadata are read here, and each array's own when it is wanted.

    **Arguments:**

    - `path`: the directory of one item, of a step, or of a run of steps; or its URL in
        an object store.
    - `step`: of a run; the newest one that is complete, unless it is given.
    - `item`: which item of a step, such as `"params"`, if it has several.

    **Returns:**

    An [`eqx_ckpt.interop.Source`][], which stands for the path of a checkpoint wherever
    one is read. `manifest.metadata` is Orbax's `custom_metadata`. Strings are listed in
    `manifest.unsaved`.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no such step or item, or it was
        never committed.
    - [`eqx_ckpt.CorruptCheckpointError`][]: its metadata are not valid.
    - [`eqx_ckpt.CheckpointError`][]: there are several items, and none was chosen; or
        `item` is given, and the path is one item; or steps have several prefixes.

    !!! example

        ```python
        import os

        import eqx_ckpt
        import jax.numpy as jnp
        import orbax.checkpoint as ocp

        state = {"w": jnp.ones((2, 3)), "step": 5}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(os.path.abspath("state"), state)
        source = eqx_ckpt.interop.open_orbax("state")
        state = eqx_ckpt.tree_deserialise_leaves(source, state)
        ```
    """
    step = check_optional_integer("step", step, 0)
    if item is not None:
        check_text("item", item)
    found = _item(path, step, item)
    place = Place(found)
    where = place.url()
    data = place.file(_METADATA, _MAX_METADATA)
    metadata = parse_object(data or b"", where, FORMAT)
    try:
        entries = [*map(_entry, metadata["tree_metadata"].values())]
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise corrupt(where, FORMAT, f"its tree is not one ({e!r})"[:300]) from None
    named = _named(place, entries)
    damage: dict[str, str] = {}
    arrays = place.describe([*named], damage)
    check_arrays(damage, place, FORMAT)
    # Otherwise it leaves out what is zero.
    is_complete = metadata.get("store_array_data_equal_to_fill_value") is True
    leaves, unsaved = _records(place, named, arrays, is_complete)
    unsaved |= {encode(e.keys): "a string" for e in entries if e.kind == "string"}
    manifest = manifest_of(
        leaves,
        where,
        unsaved=unsaved,
        metadata=metadata.get("custom_metadata"),
        separators="",
    )
    return ZarrSource(
        str(place),
        manifest,
        {encode(named[key].keys): array for key, array in arrays.items()},
        allow_missing_chunks=not is_complete,
    )


class _Entry(NamedTuple):
    """A leaf in the metadata of Orbax; `key` is where its array is."""

    key: str
    keys: TypedPath
    kind: str
    is_skipped: bool

    @property
    def is_stored(self) -> bool:
        return not self.is_skipped and self.kind not in (*_EMPTY, "string")


def _entry(entry: Any) -> _Entry:
    parts = [part["key"] for part in entry["key_metadata"]]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"its keys are {str(parts)[:100]}")
    if not is_unicode(*parts):
        raise ValueError(f"its keys {str(parts)[:100]!a} are not Unicode")
    value = entry["value_metadata"]
    kinds = [part.get("key_type") for part in entry["key_metadata"]]
    keys = tuple(map(_key, parts, kinds))
    return _Entry(
        ".".join(parts), keys, str(value["value_type"]), bool(value["skip_deserialize"])
    )


def _key(text: str, kind: Any) -> tuple[str, str | int]:
    """One entry of a key path; digits of a dictionary are an integer in a dictionary.

    It may have been the text: Orbax does not tell these apart.
    """
    found, key = position_or_key(text)
    return ("key" if kind == _OF_DICTIONARY else found), key


def _named(place: Place, entries: Iterable[_Entry]) -> dict[str, _Entry]:
    """The leaves that have arrays, by the keys of these."""
    named: dict[str, _Entry] = {}
    for entry in entries:
        if not entry.is_stored:
            continue
        if not place.is_database and _leaves_directory(entry.key):
            reason = f"its key {entry.key[:100]!r} leaves the directory"
            raise corrupt(place.url(), FORMAT, reason)
        first = named.setdefault(entry.key, entry)
        if first is not entry:
            names = f"{encode(first.keys)!r} and {encode(entry.keys)!r}"
            raise corrupt(place.url(), FORMAT, f"Orbax wrote {names} to one array")
    return named


def _leaves_directory(key: str) -> bool:
    return key != "" and any(part in ("", ".", "..") for part in key.split("/"))


def _records(
    place: Place,
    named: Mapping[str, _Entry],
    arrays: Mapping[str, ZarrArray],
    is_complete: bool,
) -> tuple[list[Named], dict[str, str]]:
    impls = _key_impls(place)
    leaves: list[Named] = []
    unsaved: dict[str, str] = {}
    for key, entry in named.items():
        array = arrays[key]
        try:
            record = array_record(array.dtype, array.shape, entry.keys)
            if key in impls:
                record = _as_key(record, impls[key])
            elif entry.kind == "jax.Array":
                record = record._replace(kind="jax")
            elif entry.kind == "np.ndarray":
                record = record._replace(kind="numpy")
            leaves.append(Named(key, record))
        except CannotSave as e:
            unsaved[encode(entry.keys)] = f"an array that {e}"
    scalars = [
        leaf
        for leaf in leaves
        if named[leaf.text].kind == "scalar" and not leaf[1].shape
    ]
    numbers = _numbers(place, scalars, arrays, is_complete)
    return [numbers.get(leaf.text, leaf) for leaf in leaves], unsaved


def _as_key(record: LeafRecord, impl: str) -> LeafRecord:
    """The record of a typed PRNG key, of whose data `record` is."""
    last = key_shape(impl)
    rank = len(record.shape) - len(last or ())
    if last is None or record.shape[rank:] != last or record.dtype != "uint32":
        raise CannotSave(f"is a PRNG key of {impl!r}, which this JAX does not know")
    return record._replace(
        kind="key", dtype="key", shape=record.shape[:rank], impl=impl
    )


def _key_impls(place: Place) -> dict[str, str]:
    """Which arrays are PRNG keys, and of which implementation."""
    impls: dict[str, str] = {}
    for process in range(_MAX_PROCESSES):
        data = place.file(f"array_metadatas/process_{process}", _MAX_METADATA)
        if data is None:
            break
        found = parse_object(data, place.url(), FORMAT).get("array_metadatas", ())
        try:
            impls.update(pair for entry in found for pair in _key_impl(entry))
        except (KeyError, TypeError, AttributeError) as e:
            reason = f"its metadata of arrays are not those ({e!r})"[:300]
            raise corrupt(place.url(), FORMAT, reason) from None
    return impls


def _key_impl(entry: Any) -> list[tuple[str, str]]:
    """The key of an array and its implementation, if it is of PRNG keys."""
    found = entry["array_metadata"]
    extra = found.get("ext_metadata") or {}
    if "random_key_impl" not in extra:
        return []
    key, impl = found["param_name"], extra["random_key_impl"]
    if not isinstance(key, str) or not isinstance(impl, str):
        raise TypeError(f"the key {key!r} is of {impl!r}")
    return [(key, impl)]


def _numbers(
    place: Place,
    scalars: Sequence[Named],
    arrays: Mapping[str, ZarrArray],
    is_complete: bool,
) -> dict[str, Named]:
    """Python numbers, which Orbax keeps in arrays of their own."""
    reads = [RegionRead(leaf.text, leaf.record, ()) for leaf in scalars]
    damage: dict[str, str] = {}
    found = read_zarr(arrays, reads, damage, allow_missing_chunks=not is_complete)
    check_arrays(damage, place, FORMAT)
    numbers: dict[str, Named] = {}
    for leaf, array in zip(scalars, found, strict=True):
        kind = _KINDS.get(array.dtype.kind)
        if kind is None:
            continue
        value = scalar_to_text(array.item())
        record = LeafRecord(kind, path=leaf.record.path, value=value)
        numbers[leaf.text] = Named(leaf.text, record)
    return numbers


def _item(path: PathLike, step: int | None, item: str | None) -> PathLike:
    """The directory that has the arrays."""
    place = Place(path)
    if _TEMPORARY in str(place):
        raise CheckpointNotFoundError(
            f"{place} was never committed: it is what Orbax leaves of a save that did "
            "not end. Open another step."
        )
    is_item = _has(path, _METADATA)
    is_step = is_item or _has(path, _STEP_METADATA)
    steps = {} if is_step else _steps(place, item, step)
    if steps:
        return _item_of_step(_step(path, steps, step), item)
    if step is not None:
        raise CheckpointNotFoundError(
            f"{place} has no steps{': it is one item' if is_item else ''}. Leave out "
            "`step`, or pass the directory of a run."
        )
    return _item_of_step(path, item)


def _steps(place: Place, item: str | None, step: int | None) -> dict[int, str]:
    """The folders of the steps in a run; none if `item` is in this directory.

    Old versions of Orbax do not mark steps: with a prefix, they may be items, unless
    one is asked for as a `step`.
    """
    files = place.files()
    if f"{item}/{_METADATA}" in files:
        return {}
    found: dict[str, re.Match[str]] = {}
    for file in files:
        name, _, rest = file.partition("/")
        match = _STEP.fullmatch(name)
        is_old = rest == _METADATA and (name.isdecimal() or step is not None)
        if match and (is_old or _IN_STEP.fullmatch(rest)):
            found[name] = match
    prefixes = sorted({match[1] or "" for match in found.values()})
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{place} has steps with the prefixes {', '.join(map(repr, prefixes))}: "
            "pass the directory of one step."
        )
    steps: dict[int, str] = {}
    for name in sorted(found):
        first = steps.setdefault(int(found[name][2]), name)
        if first != name:
            raise CheckpointError(
                f"{place} has one step twice, as {first!r} and {name!r}: pass the "
                "directory of one of them."
            )
    return steps


def _item_of_step(path: PathLike, item: str | None) -> PathLike:
    place = Place(path)
    if _has(path, _METADATA):
        if item is None:
            return path
        raise CheckpointError(
            f"{place} is one item. Leave out `item`, or pass the directory of a step."
        )
    _check_committed(path)
    items = sorted(
        name
        for name, _, rest in (file.partition("/") for file in place.files())
        if rest == _METADATA and _TEMPORARY not in name
    )
    if not items:
        raise CheckpointNotFoundError(
            f"There is no {FORMAT} at {place}: neither it nor a directory in it has a "
            f"file `{_METADATA}`."
        )
    if item is None and len(items) == 1:
        return _below(path, items[0])
    if item not in items:
        are_steps = all(map(_STEP.fullmatch, items))
        hint = "; if they are steps, the number of one as `step`" if are_steps else ""
        raise CheckpointError(
            f"{place} has the items {', '.join(map(repr, items))}: pass one of them as "
            f"`item`{'' if item is None else f', and not {item!r}'}{hint}."
        )
    return _below(path, item)


def _step(path: PathLike, steps: Mapping[int, str], step: int | None) -> PathLike:
    if step is not None and step not in steps:
        raise CheckpointNotFoundError(
            f"{Place(path)} has no step {step}, but {sorted(steps)[-10:]}."
        )
    wanted = sorted(steps, reverse=True) if step is None else [step]
    for number in wanted:
        found = _below(path, steps[number])
        if _is_committed(found):
            return found
    raise CheckpointNotFoundError(
        f"{Place(path)} has no step that was committed, among {wanted[:10]}."
    )


def _check_committed(path: PathLike) -> None:
    if not _is_committed(path):
        raise CheckpointNotFoundError(
            f"{Place(path)} was never committed: its save did not end. Open another "
            "step."
        )


def _is_committed(path: PathLike) -> bool:
    """Whether a step is complete; those of old versions of Orbax do not say it."""
    place = Place(path)
    data = place.file(_STEP_METADATA, _MAX_METADATA)
    if data is None or place.file(_COMMITTED, 2**16) is not None:
        return True
    found = parse_object(data, place.url(), FORMAT)
    return found.get("commit_timestamp_nsecs", 0) is not None


def _has(path: PathLike, name: str) -> bool:
    return Place(path).file(name, _MAX_METADATA) is not None


def _below(path: PathLike, name: str) -> PathLike:
    if isinstance(path, StorePath):
        return path / name
    return f"{os.fspath(path).rstrip('/')}/{name}"
