"""The manifest: the root `zarr.json`, which is the checkpoint."""

import functools as ft
import hashlib
import importlib.metadata
import json
import math
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._errors import CheckpointError
from .._types import Layout
from .chunks import chunk_keys
from .leaves import (
    LeafRecord,
)
from .names import folders


FORMAT_VERSION = 1
MANIFEST = "zarr.json"
MAX_BYTES = 64 * 2**20
MAX_DEPTH = 64
NO_DIGEST = "0" * 64

# The data types of the Zarr v3 core specification. zarr-python refuses a whole group
# whose consolidated metadata has any other, so only these leaves are listed there.
_ZARR_CORE = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "complex64 complex128".split()
)


VERSIONS = {
    "eqx_ckpt": importlib.metadata.version("eqx-ckpt"),
    "equinox": eqx.__version__,
    "jax": jax.__version__,
    "numpy": np.__version__,
    "tensorstore": importlib.metadata.version("tensorstore"),
    "python": platform.python_version(),
}
# Only for other readers of Zarr: all of ours is in front of it.
CONSOLIDATED = ',\n"consolidated_metadata":'
# The keys of an OCDBT database, or of one for each process.
DATABASE = r"(p\d+/)?(manifest\.(ocdbt|[0-9a-f]{16})|d/[0-9a-f]{32})"
_GROUP = {"attributes": {}, "node_type": "group", "zarr_format": 3}
COMPRESSIONS = ("zstd",)
_COMPRESSORS: dict[str | None, list[dict[str, Any]]] = {
    None: [],
    # The level is TensorStore's default. It checks the checksum that follows.
    "zstd": [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}],
}
_FILL_VALUES = {"b": False, "c": [0.0, 0.0]}


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
    - `layout`: how they lie there: `"zarr"`, each in a directory of its own name, or
        `"ocdbt"`, all in one database.
    - `format_version`: of the format, see `docs/format.md`.
    """

    leaves: Mapping[str, LeafRecord]
    others: Mapping[str, str]
    metadata: Any
    versions: Mapping[str, str]
    root: str = ""
    layout: Layout = "zarr"
    format_version: int = FORMAT_VERSION

    @property
    def nbytes(self) -> int:
        """Bytes of data in all arrays."""
        return sum(record.nbytes for record in self.leaves.values())


def zarr_metadata(record: LeafRecord) -> dict[str, Any]:
    """The `zarr.json` of a leaf's array, exactly as TensorStore writes it."""
    tag = (record.kind, record.dtype, record.impl)
    return _zarr_metadata(
        record.data_type,
        record.data_shape,
        record.chunk_shape,
        record.compression,
        tag if record.dtype != record.data_type else None,
    )


@ft.lru_cache(maxsize=4096)
def _zarr_metadata(
    data_type: str,
    data_shape: tuple[int, ...],
    chunk_shape: tuple[int, ...],
    compression: str | None,
    tag: tuple[str, str, str | None] | None,
) -> dict[str, Any]:
    """Many leaves have the same; nobody changes what this returns."""
    dtype = np.dtype(data_type)
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    fill_value = 0 if "int" in dtype.name else 0.0
    metadata: dict[str, Any] = {
        "chunk_grid": {
            "configuration": {"chunk_shape": list(chunk_shape)},
            "name": "regular",
        },
        "chunk_key_encoding": {"configuration": {"separator": "."}, "name": "default"},
        "codecs": [
            {**endian, "name": "bytes"},
            *_COMPRESSORS[compression],
            {"name": "crc32c"},
        ],
        "data_type": data_type,
        "fill_value": _FILL_VALUES.get(dtype.kind, fill_value),
        "node_type": "array",
        "shape": list(data_shape),
        "zarr_format": 3,
    }
    if tag is not None:
        names = {"kind": tag[0], "dtype": tag[1], "impl": tag[2]}
        metadata["attributes"] = {"eqx_ckpt": {k: v for k, v in names.items() if v}}
    return metadata


def foreign(keys: Iterable[str], manifest: Manifest) -> list[str]:
    """Those keys that do not belong to a checkpoint."""
    if manifest.layout == "ocdbt":
        own = re.compile(f"{MANIFEST}|{manifest.root}{DATABASE}")
        return [key for key in keys if not own.fullmatch(key)]
    names = files(manifest)
    return [key for key in keys if key not in names]


def files(manifest: Manifest) -> set[str]:
    """The keys of everything that belongs to a checkpoint without a database."""
    keys = {MANIFEST}
    for name, record in manifest.leaves.items():
        if record.is_array:
            keys.add(f"{manifest.root}{name}/{MANIFEST}")
            chunks = chunk_keys(record.data_shape, record.chunk_shape)
            keys.update(f"{manifest.root}{name}/{key}" for key in chunks)
    return keys


def to_bytes(manifest: Manifest) -> bytes:
    """The file. One leaf, one line, so that `less`, `grep` and `diff` work on it."""
    arrays = {
        manifest.root + name: zarr_metadata(record)
        for name, record in manifest.leaves.items()
        if record.data_type in _ZARR_CORE and manifest.layout == "zarr"
    }
    groups = dict.fromkeys(sorted(folders(arrays)), _GROUP)
    metadata = None if manifest.metadata is None else _pack(manifest.metadata)
    leaves = {name: _record_to_json(r) for name, r in manifest.leaves.items()}
    layout = "" if manifest.layout == "zarr" else f'"layout": "{manifest.layout}",\n'
    text = (
        '{"zarr_format": 3, "node_type": "group", "attributes": {"eqx_ckpt": {\n'
        f'"format_version": {manifest.format_version},\n'
        f'"digest": "{NO_DIGEST}",\n'
        f'"root": {json.dumps(manifest.root)},\n'
        f"{layout}"
        f'"versions": {json.dumps(manifest.versions)},\n'
        f'"metadata": {json.dumps(metadata, allow_nan=False)},\n'
        f'"others": {_lines(manifest.others)},\n'
        f'"leaves": {_lines(leaves)}\n}}}}{CONSOLIDATED} {{'
        '"kind": "inline", "must_understand": false,\n'
        f'"metadata": {_lines(groups | arrays)}\n}}}}\n'
    )
    data = text.encode()
    digest = hashlib.sha256(data).hexdigest()
    return data.replace(NO_DIGEST.encode(), digest.encode(), 1)


def _lines(entries: Mapping[str, Any]) -> str:
    dumps = json.JSONEncoder(allow_nan=False).encode
    lines = (f"{dumps(name)}: {dumps(entry)}" for name, entry in entries.items())
    return "{\n" + ",\n".join(lines) + "\n}" if entries else "{}"


def _record_to_json(record: LeafRecord) -> dict[str, Any]:
    """All fields of an array, and of a scalar those that it has."""
    entry: dict[str, Any] = {"kind": record.kind, "path": record.path}
    if record.value is not None:
        return entry | {"value": record.value}
    entry |= {"dtype": record.dtype, "shape": record.shape}
    for name in ("impl", "weak_type", "sharding", "compression"):
        if getattr(record, name) != LeafRecord._field_defaults[name]:
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
        if not _same(unpack(json.loads(text)), metadata):
            problem = "JSON would change it: a tuple to a list, or a key to a string"
        elif depth(metadata) > MAX_DEPTH or len(text) > MAX_BYTES // 4:
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


def unpack(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"@float"}:
            return float(value["@float"])
        return {k: unpack(v) for k, v in value.items()}
    if isinstance(value, list):
        return [unpack(v) for v in value]
    return value


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b or a != a


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0
