"""The manifest: the root `zarr.json`, which is the checkpoint.

Reading one is reading untrusted input: everything is checked here, in Python, before
TensorStore sees any of it.
"""

import functools as ft
import hashlib
import importlib.metadata
import json
import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import equinox as eqx
import jax
import numpy as np

from ._chunks import chunk_keys, grid_shape
from ._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ._leaves import (
    ARRAY_KINDS,
    dtype_from_tag,
    LeafRecord,
    scalar_from_text,
    SCALAR_KINDS,
    stored_dtype,
)
from ._names import encode_typed


FORMAT_VERSION = 1
MANIFEST = "zarr.json"
MAX_BYTES = 64 * 2**20
MAX_DEPTH = 64
MAX_NODES = 4_000_000
_NO_DIGEST = "0" * 64
# Every version of the format begins like this.
_HEAD = re.compile(
    rb'{"zarr_format": 3, "node_type": "group", "attributes": {"eqx_ckpt": {\n'
    rb'"format_version": (\d{1,9}),\n"digest": "([0-9a-f]{64})",\n'
)
_KEYS = {"format_version", "root", "leaves", "others", "metadata", "versions", "digest"}

# The data types of the Zarr v3 core specification. zarr-python refuses a whole group
# whose consolidated metadata has any other, so only these leaves are listed there.
_ZARR_CORE = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128".split()
)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    **Attributes:**

    - `leaves`: the record of every saved leaf, Python scalars included, by its name.
    - `others`: a fingerprint of every leaf that is not saved (functions, strings, ...),
        by its name.
    - `metadata`: what was passed as `metadata` when the checkpoint was saved.
    - `versions`: the versions of the packages that saved it.
    - `root`: below which prefix of the checkpoint's path the arrays lie.
    - `format_version`: of the format, see `docs/format.md`.
    """

    leaves: Mapping[str, LeafRecord]
    others: Mapping[str, str]
    metadata: Any
    versions: Mapping[str, str]
    root: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def nbytes(self) -> int:
        """Bytes of data in all arrays."""
        return sum(record.nbytes for record in self.leaves.values())


def zarr_metadata(record: LeafRecord) -> dict[str, Any]:
    """The `zarr.json` of a leaf's array, exactly as TensorStore writes it."""
    dtype = np.dtype(record.data_type)
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    metadata: dict[str, Any] = {
        "chunk_grid": {
            "configuration": {"chunk_shape": list(record.chunk_shape)},
            "name": "regular",
        },
        "chunk_key_encoding": {"name": "default"},
        "codecs": [{**endian, "name": "bytes"}, {"name": "crc32c"}],
        "data_type": record.data_type,
        "fill_value": _zero(dtype),
        "node_type": "array",
        "shape": list(record.data_shape),
        "zarr_format": 3,
    }
    if record.dtype != record.data_type:
        tag = {"kind": record.kind, "dtype": record.dtype, "impl": record.impl}
        metadata["attributes"] = {"eqx_ckpt": {k: v for k, v in tag.items() if v}}
    return metadata


def files(manifest: Manifest) -> set[str]:
    """The keys of everything that belongs to a checkpoint."""
    keys = {MANIFEST}
    for name, record in manifest.leaves.items():
        if record.is_array:
            keys.add(f"{manifest.root}{name}/{MANIFEST}")
            grid = grid_shape(record.data_shape, record.chunk_shape)
            keys.update(f"{manifest.root}{name}/{key}" for key in chunk_keys(grid))
    return keys


def _zero(dtype: np.dtype) -> bool | int | float | list[float]:
    if dtype == np.bool_:
        return False
    if dtype.kind == "c":
        return [0.0, 0.0]
    return 0 if "int" in dtype.name else 0.0


def to_bytes(manifest: Manifest) -> bytes:
    """The file. One leaf, one line, so that `less`, `grep` and `diff` work on it."""
    arrays = {
        name: zarr_metadata(record)
        for name, record in manifest.leaves.items()
        if record.data_type in _ZARR_CORE
    }
    folders = {
        name[:i]: {"attributes": {}, "node_type": "group", "zarr_format": 3}
        for name in arrays
        for i, character in enumerate(name)
        if character == "/"
    }
    leaves = {name: _record_to_json(r) for name, r in manifest.leaves.items()}
    text = (
        '{"zarr_format": 3, "node_type": "group", "attributes": {"eqx_ckpt": {\n'
        f'"format_version": {manifest.format_version},\n'
        f'"digest": "{_NO_DIGEST}",\n'
        f'"root": {json.dumps(manifest.root)},\n'
        f'"versions": {json.dumps(manifest.versions)},\n'
        f'"metadata": {json.dumps(_pack(manifest.metadata), allow_nan=False)},\n'
        f'"others": {_lines(manifest.others)},\n'
        f'"leaves": {_lines(leaves)}\n}}}},\n'
        '"consolidated_metadata": {"kind": "inline", "must_understand": false,\n'
        f'"metadata": {_lines(folders | arrays)}\n}}}}\n'
    )
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()
    return data.replace(_NO_DIGEST.encode(), digest.encode(), 1)


def _lines(entries: Mapping[str, Any]) -> str:
    dumps = json.JSONEncoder(allow_nan=False).encode
    lines = (f"{dumps(name)}: {dumps(entry)}" for name, entry in entries.items())
    return "{\n" + ",\n".join(lines) + "\n}" if entries else "{}"


_DEFAULTS = {f.name: f.default for f in fields(LeafRecord)}


def _record_to_json(record: LeafRecord) -> dict[str, Any]:
    """All fields of an array, and of a scalar those that it has."""
    entry: dict[str, Any] = {"kind": record.kind, "path": record.path}
    if not record.is_array:
        return entry | {"value": record.value}
    entry |= {"dtype": record.dtype, "shape": record.shape}
    for name in ("impl", "weak_type", "sharding"):
        if getattr(record, name) != _DEFAULTS[name]:
            entry[name] = getattr(record, name)
    return entry | {
        "data_type": record.data_type,
        "data_shape": record.data_shape,
        "chunk_shape": record.chunk_shape,
        "crc32c": "".join(record.crc32c),
    }


def check_metadata(metadata: Any) -> None:
    """Raise `CheckpointError` unless JSON gives `metadata` back exactly as it is."""
    try:
        text = json.dumps(_pack(metadata), allow_nan=False)
        if not _same(_unpack(json.loads(text)), metadata):
            problem = "JSON would change it: a tuple to a list, or a key to a string"
        elif _depth(metadata) > MAX_DEPTH or len(text) > MAX_BYTES // 4:
            problem = "it is larger than 16 MiB or deeper than 64 levels"
        else:
            return
    except (TypeError, ValueError, RecursionError) as e:
        problem = str(e)
    raise CheckpointError(
        f"`metadata` cannot be saved: {problem}. It has to be made of dictionaries "
        "with string keys, lists, strings, numbers, bools and `None`; for a metric, "
        "pass `float(loss)`."
    )


def _pack(value: Any) -> Any:
    """JSON has no nan and inf, which a diverged loss is."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"@float": repr(float(value))}
    if type(value) is dict:
        if "@float" in value:
            raise ValueError("the key '@float' is reserved")
        return {k: _pack(v) for k, v in value.items()}
    if type(value) is list:
        return [_pack(v) for v in value]
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"@float"}:
            return float(value["@float"])
        return {k: _unpack(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_unpack(v) for v in value]
    return value


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b or a != a


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


@ft.cache
def versions() -> dict[str, str]:
    return {
        "eqx_ckpt": importlib.metadata.version("eqx-ckpt"),
        "equinox": eqx.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "tensorstore": importlib.metadata.version("tensorstore"),
        "python": platform.python_version(),
    }


def from_bytes(data: bytes, where: str) -> Manifest:
    """Read a manifest; `where` names it in errors.

    Raises `CheckpointNotFoundError` for the `zarr.json` of something else, and
    `CorruptCheckpointError` for anything that this package would not have written.
    """

    def corrupt(reason: str) -> NoReturn:
        raise CorruptCheckpointError(
            f"The manifest {where} is damaged: {reason}. Nothing was read from this "
            "checkpoint; restore another one."
        )

    if len(data) > MAX_BYTES:
        corrupt(f"it has {len(data)} bytes, and no manifest has more than {MAX_BYTES}")
    head = _HEAD.match(data)
    if head is None and b"eqx_ckpt" not in data and b"format_version" not in data:
        raise CheckpointNotFoundError(
            f"No checkpoint of this package: {where} is the metadata of something else."
        )
    if head is None:
        corrupt("it does not begin as one")
    version, digest = head.groups()
    blank = data[: head.start(2)] + _NO_DIGEST.encode() + data[head.end(2) :]
    if hashlib.sha256(blank).hexdigest() != digest.decode():
        corrupt("its bytes do not have the digest that it states")
    if int(version) > FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {where} has format version {int(version)}, and this "
            f"version of eqx_ckpt reads up to {FORMAT_VERSION}: upgrade eqx_ckpt to "
            "restore it."
        )
    if data.count(b"{") + data.count(b"[") > MAX_NODES:
        corrupt(f"it has more than {MAX_NODES} JSON objects")
    try:
        document = json.loads(
            data, object_pairs_hook=_without_duplicates, parse_constant=_not_finite
        )
        return _checked(document["attributes"]["eqx_ckpt"])
    except _Wrong as e:
        corrupt(str(e))
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        corrupt(f"it is not JSON ({type(e).__name__}: {str(e)[:200]})")


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
    _require(content.keys() == _KEYS, f"it has the keys {sorted(content)}")
    _require(content["format_version"] == FORMAT_VERSION, "it has no format version")
    root, leaves, others = content["root"], content["leaves"], content["others"]
    _require(type(root) is str and _is_root(root), f"its root is {root!r}"[:200])
    for name in ("leaves", "others", "versions"):
        _require(type(content[name]) is dict, f"`{name}` is not a dictionary")
    _require(all(type(v) is str for v in others.values()), "`others` are not strings")
    try:
        metadata = _unpack(content["metadata"])
        _require(_depth(metadata) <= MAX_DEPTH, "its metadata are too deep")
    except (ValueError, TypeError, RecursionError) as e:
        raise _Wrong(f"its metadata are not what was saved ({e})") from e
    return Manifest(
        leaves={name: _checked_record(name, leaf) for name, leaf in leaves.items()},
        others=others,
        metadata=metadata,
        versions=content["versions"],
        root=root,
    )


def _is_root(root: str) -> bool:
    attempt = root.removeprefix("@").removesuffix("/")
    return root == "" or (root == f"@{attempt}/" and attempt.isalnum())


def _checked_record(name: str, entry: Any) -> LeafRecord:
    try:
        record = _record_from_json(entry)
        _check_record(record)
        _require(encode_typed(record.path) == name, "its path is another leaf's")
    except (ValueError, TypeError, KeyError, OverflowError) as e:
        raise _Wrong(f"the record of leaf {name[:200]!r} is wrong ({e})") from e
    return record


def _record_from_json(entry: Any) -> LeafRecord:
    _require(type(entry) is dict, "it is not a dictionary")
    _require(entry.keys() <= _DEFAULTS.keys(), "it has unknown fields")
    path = entry["path"]
    _require(type(path) is list, "its path is not a list")
    for key in path:
        _require(type(key) is list and len(key) == 2, "its path has a wrong entry")
        _require(type(key[1]) in (str, int), "its path has a wrong key")
    values: dict[str, Any] = {**entry, "path": tuple(map(tuple, path))}
    for field in ("shape", "data_shape", "chunk_shape"):
        if field in entry:
            values[field] = _sizes(field, entry[field])
    text = entry.get("crc32c", "")
    _require(type(text) is str and len(text) % 8 == 0, "its checksums are cut")
    values["crc32c"] = tuple(text[i : i + 8] for i in range(0, len(text), 8))
    return LeafRecord(**values)


def _sizes(field: str, value: Any) -> tuple[int, ...]:
    _require(type(value) is list and len(value) <= 32, f"`{field}` is no shape")
    _require(all(type(n) is int and 0 <= n < 2**62 for n in value), f"`{field}`")
    return tuple(value)


def _check_record(record: LeafRecord) -> None:
    if record.kind in SCALAR_KINDS:
        _require(type(record.value) is str, "it has no value")
        scalar_from_text(record.kind, record.value or "")
        return
    _require(record.kind in ARRAY_KINDS, f"its kind is {str(record.kind)[:50]!r}")
    _require(type(record.weak_type) is bool, "`weak_type` is not a bool")
    _require(type(record.sharding) in (dict, type(None)), "`sharding` is wrong")
    if record.kind == "key":
        _require(type(record.impl) is str, "it has no PRNG implementation")
        _require(record.data_type == "uint32", "a key's data are uint32")
        n = len(record.shape)
        _require(record.data_shape[:n] == record.shape, "shapes differ")
    else:
        data_type = stored_dtype(dtype_from_tag(record.dtype))
        _require(record.data_type == data_type, "its data type is wrong")
        _require(record.data_shape == record.shape, "its shapes differ")
    chunk, shape = record.chunk_shape, record.data_shape
    _require(len(chunk) == len(shape) and 0 not in chunk, "its chunks are no grid")
    _require(math.prod(chunk) * record.itemsize < 2**62, "its chunks are too large")
    chunks = math.prod(grid_shape(shape, chunk))
    _require(chunks == len(record.crc32c), f"{chunks} chunks, other checksums")
