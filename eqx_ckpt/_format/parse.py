"""Reading a manifest is reading untrusted input.

Everything is checked here, in Python, before TensorStore sees any of it: it can abort
the process on hostile metadata.
"""

import contextlib
import hashlib
import json
import math
import re
from collections.abc import Generator, Iterable
from typing import Any, NoReturn

from .._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from .chunks import grid_shape
from .leaves import (
    ARRAY_KINDS,
    dtype_from_tag,
    key_shape,
    LeafRecord,
    scalar_from_text,
    SCALAR_KINDS,
    STORED,
    tag_and_data_type,
    VIEWED,
)
from .manifest import (
    COMPRESSIONS,
    CONSOLIDATED,
    DATABASE,
    depth,
    foreign,
    FORMAT_VERSION,
    MANIFEST,
    Manifest,
    MAX_BYTES,
    MAX_DEPTH,
    NO_DIGEST,
    unpack,
)
from .names import encode, folders


_MAX_NODES = 4_000_000
_KEYS = {"format_version", "root", "leaves", "others", "metadata", "versions", "digest"}
# Every version of the format begins like this, within `HEAD_BYTES`.
HEAD_BYTES = 1024
HEAD = re.compile(
    rb'{"zarr_format": 3, "node_type": "group", "attributes": {"eqx_ckpt": {\n'
    rb'"format_version": (\d{1,9}),\n"digest": "([0-9a-f]{64})",\n'
)
_OWN_NAME = re.compile(rf"(.+/)?({MANIFEST}|c(\.\d+)*|{DATABASE})")
_METADATA = re.compile(rb'\n"metadata": (.*),\n"others": ')


def from_bytes(data: bytes, where: str) -> Manifest:
    """Read a manifest; `where` names it in errors.

    Raises `CheckpointNotFoundError` for the `zarr.json` of something else, and
    `CorruptCheckpointError` for anything that this package would not have written.
    """
    ours = _verified(data, where)
    if ours.count(b"{") + ours.count(b"[") > _MAX_NODES:
        raise _corrupt(where, f"it has more than {_MAX_NODES} JSON objects")
    with _reading(where):
        return _checked(_loads(ours)["attributes"]["eqx_ckpt"])


def strangers(keys: Iterable[str], manifest: bytes | None, where: str) -> list[str]:
    """Those keys that do not belong to the checkpoint of a manifest.

    If it is damaged, what is named as a checkpoint's files are belongs to it.
    """
    keys = list(keys)
    try:
        return keys if manifest is None else foreign(keys, from_bytes(manifest, where))
    except CorruptCheckpointError:
        is_ours = b"eqx_ckpt" in (manifest or b"")
        return [key for key in keys if not (is_ours and _OWN_NAME.fullmatch(key))]
    except CheckpointError:
        return keys


def metadata_from_bytes(data: bytes, where: str) -> Any:
    """The metadata of a manifest alone: forty times faster, if there are many leaves.

    Its digest is checked, but not what it says of the leaves.
    """
    line = _METADATA.search(_verified(data, where))
    if line is None:
        raise _corrupt(where, "it has no metadata")
    with _reading(where):
        return _checked_metadata(_loads(line[1]))


def _verified(data: bytes, where: str) -> bytes:
    """Our part of a manifest, whose digest is right."""
    if len(data) > MAX_BYTES:
        size = f"it has {len(data)} bytes, and no manifest has more than {MAX_BYTES}"
        raise _corrupt(where, size)
    head = HEAD.match(data)
    if head is None and is_foreign(data):
        raise CheckpointNotFoundError(
            f"No checkpoint of this package: {where} holds the Zarr metadata of "
            "something else."
        )
    if head is None:
        raise _corrupt(where, "it does not begin as one")
    version, digest = head.groups()
    blank = data[: head.start(2)] + NO_DIGEST.encode() + data[head.end(2) :]
    if hashlib.sha256(blank).hexdigest() != digest.decode():
        raise _corrupt(where, "its bytes do not have the digest that it states")
    if int(version) > FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {where} has format version {int(version)}, and this "
            f"version of eqx_ckpt reads up to {FORMAT_VERSION}: upgrade eqx_ckpt to "
            "restore it."
        )
    return data.partition(CONSOLIDATED.encode())[0] + b"}"


def _corrupt(where: str, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"The manifest {where} is damaged: {reason}. Nothing was read from this "
        "checkpoint; restore another one."
    )


@contextlib.contextmanager
def _reading(where: str) -> Generator[None, None, None]:
    """Translates what malformed JSON raises."""
    try:
        yield
    except _Wrong as e:
        raise _corrupt(where, str(e)) from None
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        reason = f"it is not JSON ({type(e).__name__}: {str(e)[:200]})"
        raise _corrupt(where, reason) from None


def _loads(text: bytes) -> Any:
    return json.loads(
        text, object_pairs_hook=_without_duplicates, parse_constant=_not_finite
    )


def is_foreign(data: bytes) -> bool:
    """Whether it is sound JSON of somebody else: damage is not to look like absence."""
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


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise _Wrong(problem)


def _checked(content: dict[str, Any]) -> Manifest:
    keys = content.keys() | {"layout"}
    _require(keys == _KEYS | {"layout"}, f"it has the keys {sorted(content)}")
    _require(content["format_version"] == FORMAT_VERSION, "it has no format version")
    root, leaves, others = content["root"], content["leaves"], content["others"]
    layout = content.get("layout", "zarr")
    _require(layout in ("zarr", "ocdbt"), "its layout is not known")
    _require(type(root) is str and _is_root(root), f"its root is {root!r}"[:200])
    for name in ("leaves", "others", "versions"):
        _require(type(content[name]) is dict, f"`{name}` is not a dictionary")
    _require(all(type(v) is str for v in others.values()), "`others` are not strings")
    metadata = _checked_metadata(content["metadata"])
    _require(not folders(leaves) & leaves.keys(), "a leaf is inside another one")
    return Manifest(
        leaves={name: _checked_record(name, leaf) for name, leaf in leaves.items()},
        others=others,
        metadata=metadata,
        versions=content["versions"],
        root=root,
        layout=layout,
    )


def _checked_metadata(packed: Any) -> Any:
    try:
        metadata = unpack(packed)
        _require(depth(metadata) <= MAX_DEPTH, "its metadata are too deep")
    except (ValueError, TypeError, RecursionError) as e:
        raise _Wrong(f"its metadata are not what was saved ({e})") from e
    return metadata


def _is_root(root: str) -> bool:
    attempt = root.removeprefix("@").removesuffix("/")
    return root == "" or (root == f"@{attempt}/" and attempt.isalnum())


def _checked_record(name: str, entry: Any) -> LeafRecord:
    try:
        record = _record_from_json(entry)
        if record.value is None:
            _check_array(record)
        else:
            scalar_from_text(record.kind, record.value)
        if encode(record.path) != name:
            raise _Wrong("its path is another leaf's")
    except (ValueError, TypeError, KeyError, OverflowError) as e:
        raise _Wrong(f"the record of leaf {name[:200]!r} is wrong ({e})") from e
    return record


def _record_from_json(entry: Any) -> LeafRecord:
    values = dict(entry)
    path = values["path"]
    if type(path) is not list or not all(map(_is_key, path)):
        raise _Wrong("its path is no key path")
    values["path"] = tuple(map(tuple, path))
    if "value" in values:
        record = LeafRecord(**values)
        if record.kind not in SCALAR_KINDS or type(record.value) is not str:
            raise _Wrong("it is no scalar")
        return record
    for field in ("shape", "data_shape", "chunk_shape"):
        sizes = values[field]
        if type(sizes) is not list or not all(type(n) is int and n >= 0 for n in sizes):
            raise _Wrong(f"its {field} is no shape")
        values[field] = tuple(sizes)
    text = values["crc32c"]
    values["crc32c"] = tuple(text[i : i + 8] for i in range(0, len(text), 8))
    return LeafRecord(**values)


def _is_key(key: Any) -> bool:
    return (
        type(key) is list
        and len(key) == 2
        and key[0] in ("attr", "index", "key")
        and type(key[1]) in (str, int)
    )


def _check_array(record: LeafRecord) -> None:
    shape, chunk = record.data_shape, record.chunk_shape
    if record.kind not in ARRAY_KINDS:
        raise _Wrong(f"its kind is {str(record.kind)[:50]!r}")
    if record.compression not in (None, *COMPRESSIONS):
        raise _Wrong(f"its compression is {str(record.compression)[:50]!r}")
    if type(record.weak_type) is not bool or type(record.sharding) not in _OPTIONAL:
        raise _Wrong("`weak_type` or `sharding` is of the wrong type")
    if record.kind == "key":
        _check_key(record)
    elif (
        record.data_type != tag_and_data_type(dtype_from_tag(record.dtype))[1]
        or shape != record.shape
        or (record.kind == "jax" and record.dtype not in STORED | VIEWED)
    ):
        raise _Wrong("its array has another dtype or shape")
    if len(chunk) != len(shape) or len(shape) > 32 or 0 in chunk:
        raise _Wrong("its chunks are no grid")
    for sizes in (chunk, shape):
        # The sizes of empty arrays too: NumPy refuses products beyond 63 bits.
        if math.prod(n or 1 for n in sizes) * record.itemsize >= 2**62:
            raise _Wrong("it is too large")
    if math.prod(grid_shape(shape, chunk)) != len(record.crc32c):
        raise _Wrong("it has not one checksum for each chunk")


_OPTIONAL = (dict, type(None))


def _check_key(record: LeafRecord) -> None:
    if (
        record.dtype != "key"
        or record.data_type != "uint32"
        or type(record.impl) is not str
        or not record.impl.isascii()
    ):
        raise _Wrong("it is no PRNG key")
    expected = key_shape(record.impl)
    if expected is not None and record.data_shape != record.shape + expected:
        raise _Wrong("it has the shape of another PRNG implementation")
