"""Read a manifest, which is untrusted input.

This module checks everything in Python before TensorStore sees any of it, because
hostile metadata can make TensorStore abort the process.
"""

import contextlib
import functools as ft
import hashlib
import json
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from .._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from .._types import LAYOUTS, SHARING_LAYOUTS
from .chunk_grid import chunk_count
from .leaf_names import (
    check_path,
    Decoder,
    encode,
    inside_others,
    MAX_LEVELS,
    too_many_levels,
)
from .leaf_record import (
    CannotSave,
    CHECKSUM_DIGITS,
    LeafRecord,
    scalar_from_text,
    SCALAR_KINDS,
)
from .manifest import (
    check_array,
    DATABASE,
    excess,
    foreign,
    FORMAT_VERSION,
    is_separators,
    is_unsaved,
    MANIFEST,
    Manifest,
    NO_DIGEST,
)
from .references import References, references_from_json
from .run_history import (
    History,
    history_from_json,
    history_to_json,
    Part,
    part_from_json,
)
from .user_metadata import depth, MAX_DEPTH, MAX_METADATA_BYTES, unpack


# The beginning of a manifest in every format version, within `HEAD_BYTES`.
HEAD_BYTES = 256


START = b'{"zarr_format": 3, "node_type": "group", "attributes": {"eqx_ckpt": {\n'


HEAD = re.compile(
    re.escape(START) + rb'"format_version": (\d{1,9}),\n"digest": "([0-9a-f]{64})"'
)


# The parts that follow the head, in order, and how each of them begins.
_PARTS = {
    "root": b'"',
    "layout": b'"',
    "versions": b"{",
    "metadata": b"",
    "unsaved": b"{",
    "optional": b"{",
    "necessary": b"{",
    "types": b"[",
    "leaves": b"{",
}


_TAIL = b"\n}}}\n"


# How each part begins in the file, with how many bytes of that are its own.
_MARKERS = [
    (name, b',\n"%b": %b' % (name.encode(), first), len(first))
    for name, first in _PARTS.items()
]


# The necessary fields that this version knows.
_NECESSARY = {"part", "references"}


# What checks of values of any type raise.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


_HEX = "0123456789abcdef"


_TYPE_FIELDS = LeafRecord._fields[:10]
_KNOWN = frozenset(_TYPE_FIELDS)


# As `LeafRecord._make`, which is a function of Python, and called for each leaf.
_record: Callable[[tuple[Any, ...]], LeafRecord] = ft.partial(tuple.__new__, LeafRecord)


def from_bytes(data: bytes, where: str) -> Manifest:
    """Read a manifest; `where` names it in errors.

    Raise `CheckpointNotFoundError` for a `zarr.json` of something else, and
    `CorruptCheckpointError` for anything that this package would not have written.
    """
    with _opened(data, where) as parts:
        return _checked(parts)


def metadata_from_bytes(data: bytes, where: str) -> Any:
    """Read only the metadata of a manifest: forty times faster if there are many
    leaves.

    The digest is checked, but not the records of the leaves.
    """
    with _opened(data, where) as parts:
        return _checked_metadata(parts["metadata"])


def history_from_bytes(data: bytes, where: str) -> History | None:
    """Read only the history of a manifest, as `metadata_from_bytes` the metadata."""
    with _opened(data, where) as parts:
        return _checked_history(_loads(parts["optional"]))


def metadata_and_history_from_bytes(
    data: bytes, where: str
) -> tuple[Any, History | None]:
    """Read both, as `metadata_from_bytes` the metadata."""
    with _opened(data, where) as parts:
        metadata = _checked_metadata(parts["metadata"])
        return metadata, _checked_history(_loads(parts["optional"]))


@contextlib.contextmanager
def _opened(data: bytes, where: str) -> Generator[dict[str, memoryview]]:
    """The parts of a manifest with the right digest, which this version can read."""
    head = _verified(data, where)
    with _reading(where):
        parts = _parts(data, head)
        _check_necessary(parts["necessary"], where)
        yield parts


def _check_necessary(text: memoryview, where: str) -> None:
    """Raise if a manifest has a necessary field that this version does not know."""
    if unknown := _loads(text).keys() - _NECESSARY:
        raise _newer(
            where,
            f"was saved by a newer version of eqx_ckpt: it has {sorted(unknown)}, "
            "which a reader needs to know",
        )


def _verified(data: bytes, where: str) -> int:
    """Check the digest and the version, and return where the head ends."""
    head = HEAD.match(data)
    if head is None and is_foreign(data):
        raise CheckpointNotFoundError(
            f"No checkpoint of this package: {where} holds the Zarr metadata of "
            "something else."
        )
    if head is None or not data.endswith(_TAIL):
        raise _corrupt(where, "it does not begin or end as one")
    if problem := excess(data):
        raise _corrupt(where, problem)
    version, digest = head.groups()
    blank = hashlib.sha256(data[: head.start(2)] + NO_DIGEST.encode())
    blank.update(memoryview(data)[head.end(2) :])
    if blank.hexdigest() != digest.decode():
        raise _corrupt(where, "its bytes do not have the digest that it states")
    if int(version) == 0:
        raise _corrupt(where, "it has no format version")
    if int(version) > FORMAT_VERSION:
        raise _newer(
            where,
            f"has format version {int(version)}, and this version of eqx_ckpt reads "
            f"up to {FORMAT_VERSION}",
        )
    return head.end()


def _newer(where: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {where} {why}: upgrade eqx_ckpt to read it."
    )


def _corrupt(where: str, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"The manifest {where} is damaged: {reason}. Nothing was read from this "
        "checkpoint; restore another one."
    )


@contextlib.contextmanager
def _reading(where: str) -> Generator[None, None, None]:
    """Translate the errors of malformed JSON."""
    try:
        yield
    except _Wrong as e:
        raise _corrupt(where, str(e)) from None
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        reason = f"it is not JSON ({type(e).__name__}: {str(e)[:200]})"
        raise _corrupt(where, reason) from None


def _parts(data: bytes, start: int) -> dict[str, memoryview]:
    """The JSON of each part. No string has a line break, so none can fake a part."""
    parts: dict[str, memoryview] = {}
    view, last = memoryview(data), len(data) - len(_TAIL)
    ends = [marker for _, marker, _ in _MARKERS[1:]]
    for (name, marker, own), end in zip(_MARKERS, [*ends, None], strict=True):
        stop = last if end is None else data.find(end, start + 1)
        if stop < 0 or not data.startswith(marker, start):
            raise _Wrong(f"it has no `{name}` where that belongs")
        parts[name] = view[start + len(marker) - own : stop]
        start = stop
    return parts


def _loads(text: memoryview) -> Any:
    return _DECODER.decode(str(text, "ascii"))


def is_foreign(data: bytes) -> bool:
    """Whether `data` is valid JSON of something else, not a damaged manifest."""
    if b"eqx_ckpt" in data or len(data) > 2**20:
        return False
    try:
        return type(json.loads(data)) is dict
    except (ValueError, RecursionError):
        return False


class _Wrong(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a key occurs twice")
    return entries


def _not_finite(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


# `json.loads` would make a new one for each text.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_duplicates, parse_constant=_not_finite
)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise _Wrong(problem)


def _checked(parts: dict[str, memoryview]) -> Manifest:
    metadata = _checked_metadata(parts.pop("metadata"))
    content = {name: _loads(text) for name, text in parts.items()}
    root, leaves, unsaved = content["root"], content["leaves"], content["unsaved"]
    _require(content["layout"] in LAYOUTS, "its layout is not known")
    # Fields that this version does not know may be among the optional ones.
    optional = content["optional"]
    _require(
        "separators" not in optional or is_separators(optional["separators"]),
        "its separators are not those of a format",
    )
    _require(_is_root(root), f"its root is {root!r}"[:200])
    for name, text in unsaved.items():
        _require(is_unsaved(name, text), f"{name[:200]!r} cannot be in `unsaved`")
    types = [*map(_checked_type, content["types"])]
    path_of = Decoder()
    for name, entry in leaves.items():
        leaves[name] = _checked_leaf(name, entry, types, path_of)
    _require(not any(inside_others(leaves)), "a leaf is inside another one")
    return Manifest(
        leaves=leaves,
        unsaved=unsaved,
        metadata=metadata,
        versions=content["versions"],
        root=root,
        layout=content["layout"],
        separators=optional.get("separators"),
        history=_checked_history(optional),
        part=_checked_part(content["necessary"]),
        references=_checked_references(content, leaves),
    )


def _checked_history(optional: dict[str, Any]) -> History | None:
    if "history" not in optional:
        return None
    try:
        return history_from_json(optional["history"])
    except ValueError as e:
        raise _Wrong(str(e)) from None


def _checked_part(necessary: dict[str, Any]) -> Part | None:
    if "part" not in necessary:
        return None
    try:
        return part_from_json(necessary["part"])
    except ValueError as e:
        raise _Wrong(str(e)) from None


def _checked_references(
    content: dict[str, Any], leaves: dict[str, LeafRecord]
) -> References:
    if "references" not in content["necessary"]:
        return {}
    _require(content["layout"] in SHARING_LAYOUTS, "a database refers to other steps")
    found = content["necessary"]["references"]
    try:
        return references_from_json(found, content["root"], leaves)
    except ValueError as e:
        raise _Wrong(str(e)) from None


def check_source(source: Manifest, where: str) -> None:
    """Raise unless a manifest can hold what a source says of its leaves."""
    leaves = source.leaves
    problems: dict[str, str] = {}
    for name, record in leaves.items():
        try:
            _check_record(name, record)
        except (*_MALFORMED, CannotSave) as e:
            problems[name] = str(e)
    for name, _ in inside_others(leaves):
        problems[name] = "another leaf is inside it"
    for name, text in source.unsaved.items():
        if not is_unsaved(name, text):
            problems[name] = "what `unsaved` has is not a text, under a name of a leaf"
    if source.separators is not None and not is_separators(source.separators):
        raise CheckpointError(
            f"{where} has {source.separators!r} as `separators`. They have to be a "
            "text of a few characters, or `None`."
        )
    _check_history(source.history, where)
    if problems:
        raise CheckpointError(
            f"{where} lists leaves that no checkpoint can have:\n"
            + "\n".join(f"- {n!r}: {problem}." for n, problem in problems.items())
        )


def _check_history(history: History | None, where: str) -> None:
    if history is None:
        return
    try:
        # As what a manifest would have.
        history_from_json(json.loads(json.dumps(history_to_json(history))))
    except _MALFORMED as e:
        raise CheckpointError(
            f"{where} has a `history` that no step has: {e}. Pass that of a manifest, "
            "or `None`."
        ) from e


def _check_record(name: str, record: LeafRecord) -> None:
    check_path(name, record.path)
    if record.kind in SCALAR_KINDS:
        scalar_from_text(record.kind, record.value or "")
    else:
        _require(record.value is None, "it is an array, and has a `value`")
        check_array(record)


def _checked_metadata(text: memoryview) -> Any:
    _require(len(text) <= MAX_METADATA_BYTES, "its metadata are too large")
    try:
        metadata = unpack(_loads(text))
        _require(depth(metadata) <= MAX_DEPTH, "its metadata are too deep")
    except (ValueError, TypeError, RecursionError) as e:
        raise _Wrong(f"its metadata are not what was saved ({e})") from e
    return metadata


def _is_root(root: str) -> bool:
    attempt = root.removeprefix("@").removesuffix("/")
    return root == "" or (root == f"@{attempt}/" and attempt.isalnum())


class _Type(NamedTuple):
    """The properties that leaves share: all fields of a record but the last three.

    `chunks` is the number of checksums of each leaf, and `None` for scalars.
    """

    fields: tuple[Any, ...]
    chunks: int | None


def _checked_type(entry: Any) -> _Type:
    try:
        fields = dict(entry)
        kind = fields["kind"]
        if fields.keys() == {"kind"} and kind in SCALAR_KINDS:
            return _Type(LeafRecord(kind)[: len(_TYPE_FIELDS)], None)
        if not fields.keys() <= _KNOWN:
            raise _Wrong(f"it has the keys {sorted(fields)}")
        fields.setdefault("data_type", fields["dtype"])
        fields.setdefault("data_shape", fields["shape"])
        for name in ("shape", "data_shape", "chunk_shape"):
            _require(type(fields[name]) is list, f"its {name} is not a shape")
            fields[name] = tuple(fields[name])
        record = LeafRecord(**fields)
        check_array(record)
    except (ValueError, TypeError, KeyError, OverflowError, CannotSave) as e:
        raise _Wrong(f"a type of leaves is wrong: {str(entry)[:200]} ({e})") from e
    chunks = chunk_count(record.data_shape, record.chunk_shape)
    return _Type(record[: len(_TYPE_FIELDS)], chunks)


def _checked_leaf(
    name: str, entry: Any, types: Sequence[_Type], path_of: Decoder
) -> LeafRecord:
    try:
        number, keys, text = entry
        if type(number) is not int or number < 0:
            raise _Wrong("its type is not a number")
        fields, chunks = types[number]
        kinds, _, uncut = keys.partition(" ")
        path = path_of(uncut or name, kinds)
        if uncut and encode(path) != name:
            raise _Wrong("its path is another leaf's")
        if len(path) > MAX_LEVELS:
            raise _Wrong(too_many_levels(path))
        if chunks is None:
            _require(type(text) is str, "its value is not text")
            scalar_from_text(fields[0], text)
            return _record((*fields, path, text, ()))
        if len(text) != CHECKSUM_DIGITS * chunks or text.strip(_HEX):
            raise _Wrong("it does not have two checksums for each chunk")
        if chunks == 1:
            return _record((*fields, path, None, (text,)))
        starts = range(0, len(text), CHECKSUM_DIGITS)
        checksums = tuple([text[i : i + CHECKSUM_DIGITS] for i in starts])
        return _record((*fields, path, None, checksums))
    except _MALFORMED as e:
        raise _Wrong(f"the record of leaf {name[:200]!r} is wrong ({e})") from e


_OWN_NAME = re.compile(rf"(.+/)?({MANIFEST}|c(\.\d+)*|{DATABASE})")


def unrelated_keys(
    keys: Iterable[str], manifest: bytes | None, where: str, *, on_disk: bool = False
) -> list[str]:
    """The keys among `keys` that do not belong to the checkpoint of a manifest.

    If the manifest is damaged, all files named like those of a checkpoint belong to it.
    After a crash, a file `on_disk` may be empty, cut, or end in zeros.
    """
    keys = list(keys)
    if manifest is None:
        return keys
    try:
        return foreign(keys, from_bytes(manifest, where))
    except CorruptCheckpointError:
        is_cut = on_disk and START.startswith(manifest.rstrip(b"\0"))
        is_ours = is_cut or b"eqx_ckpt" in manifest
        return [key for key in keys if not (is_ours and _OWN_NAME.fullmatch(key))]
    except CheckpointError:
        return keys
