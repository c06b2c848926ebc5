"""The manifest: the `zarr.json` at the root of a checkpoint."""

import functools as ft
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._errors import CheckpointError
from .._lazy import np
from .._types import Layout
from .chunk_grid import chunk_count, chunk_keys
from .display import escape, first_lines, in_bytes, tree_html
from .dtype_names import DATA_TYPES, OF_JAX, SIX_BITS, SIZES
from .leaf_names import encode, is_cut, is_encoded
from .leaf_record import (
    ARRAY_KINDS,
    CannotSave,
    CHECKSUM_DIGITS,
    key_shape,
    LeafRecord,
)
from .references import PIN, References, references_to_text
from .run_history import History, history_to_json, Part
from .user_metadata import pack


FORMAT_VERSION = 1


MANIFEST = "zarr.json"


# Readers enforce these limits, so writers check them too. They allow about two million
# leaves. Each JSON value follows one of the tokens, and costs a reader up to 100 bytes
# of memory.
MAX_BYTES = 256 * 2**20


MAX_TOKENS = 16_000_000


# TensorStore's limit.
_MAX_RANK = 32


# NumPy refuses sizes whose product exceeds 63 bits, also for empty arrays.
_MAX_ARRAY_BYTES = 2**62


_MOST_SEPARATORS = 16


NO_DIGEST = "0" * 64


# The keys of an OCDBT database, or of one database per process.
DATABASE = r"(p\d+/)?(manifest\.(ocdbt|[0-9a-f]{16})|d/[0-9a-f]{32})"


COMPRESSIONS = ("zstd",)


_COMPRESSORS: dict[str | None, list[dict[str, Any]]] = {
    None: [],
    # TensorStore's default level. Without zstd's own checksum, because a crc32c
    # follows.
    "zstd": [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}],
}


_FILL_VALUES = {"b": False, "c": [0.0, 0.0]}


@dataclass(frozen=True, repr=False)
class Manifest:
    """The contents of a checkpoint, without the values of arrays.

    **Attributes:**

    - `leaves`: the record of each saved leaf by name, including Python scalars.
    - `unsaved`: a fingerprint of each leaf that is not saved (functions, strings, ...),
        by name; for a cursor of data, the settings of its loader. A restore compares it
        with `like`.
    - `metadata`: the `metadata` that the save was given.
    - `versions`: the versions of the packages that saved it.
    - `root`: the directory or key prefix of the arrays, below the checkpoint's path.
    - `layout`: how the arrays are stored there: `"zarr"`, each in a directory of its
        own name, or `"ocdbt"`, all in one database.
    - `format_version`: the version of the format, see `docs/format.md`.
    - `separators`: for a source of another format, and for a copy of one, the
        characters at which it splits what it has of a key path, perhaps none. A leaf of
        `like` that has no leaf of its name there is restored from the one that it would
        have become. `None`: by their names only.
    - `history`: of a step that a manager saved, the [`eqx_ckpt.inspect.History`][]: its
        run, and which step it goes on from.
    - `part`: of a step of which each process of a job has a part on its own disk, the
        [`eqx_ckpt.inspect.Part`][] that this is. The leaves are shards then.
    - `references`: of a step of an incremental run in a store, by the name of each leaf
        that shares chunks with earlier steps, for each chunk in C order, the prefix
        below the run where it is, or `""` if it is the step's own.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        tree = {"w": jnp.ones(3), "step": 7}
        eqx_ckpt.tree_serialise_leaves("ckpt", tree, metadata={"loss": 0.5})
        manifest = eqx_ckpt.inspect.read_manifest("ckpt")
        assert {*manifest.leaves} == {"w", "step"}
        assert manifest.metadata == {"loss": 0.5}
        assert manifest.nbytes == 12
        ```
    """

    leaves: Mapping[str, LeafRecord]
    unsaved: Mapping[str, str] = field(default_factory=dict)
    metadata: Any = None
    versions: Mapping[str, str] = field(default_factory=dict)
    root: str = ""
    layout: Layout = "zarr"
    format_version: int = FORMAT_VERSION
    separators: str | None = None
    history: History | None = None
    part: Part | None = None
    references: References = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of data in all arrays."""
        return sum(record.nbytes for record in self.leaves.values())

    def _head(self) -> str:
        version = self.versions.get("eqx_ckpt")
        by = f", saved by eqx_ckpt {version}" if version else ""
        return f"Manifest of {len(self.leaves)} leaves, {in_bytes(self.nbytes)}{by}"

    def __repr__(self) -> str:
        lines = [f"{name}: {record}" for name, record in self.leaves.items()]
        return first_lines(self._head(), lines)

    def _repr_html_(self) -> str:
        leaves = {n: (str(r), r.nbytes) for n, r in self.leaves.items()}
        metadata = (
            "" if self.metadata is None else f"<p>{escape(repr(self.metadata))}</p>"
        )
        return tree_html(self._head(), leaves) + metadata


@ft.lru_cache(maxsize=4096)
def zarr_json(properties: tuple[Any, ...]) -> bytes:
    """The `zarr.json` of an array, exactly as TensorStore writes it.

    `properties`: the first nine fields of its record; many arrays are alike in them.
    """
    record = LeafRecord(*properties)
    dtype = np.dtype(record.data_type)
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    fill_value = 0 if "int" in dtype.name else 0.0
    metadata: dict[str, Any] = {
        "chunk_grid": {
            "configuration": {"chunk_shape": list(record.chunk_shape)},
            "name": "regular",
        },
        "chunk_key_encoding": {"configuration": {"separator": "."}, "name": "default"},
        "codecs": [
            {**endian, "name": "bytes"},
            *_COMPRESSORS[record.compression],
            {"name": "crc32c"},
        ],
        "data_type": record.data_type,
        "fill_value": _FILL_VALUES.get(dtype.kind, fill_value),
        "node_type": "array",
        "shape": list(record.data_shape),
        "zarr_format": 3,
    }
    if record.dtype != record.data_type:
        names = {"kind": record.kind, "dtype": record.dtype, "impl": record.impl}
        metadata["attributes"] = {"eqx_ckpt": {k: v for k, v in names.items() if v}}
    return json.dumps(metadata, separators=(",", ":"), sort_keys=True).encode()


def foreign(keys: Iterable[str], manifest: Manifest) -> list[str]:
    """The keys among `keys` that do not belong to a checkpoint."""
    is_own = _OWN_KEYS[manifest.layout](manifest)
    return [key for key in keys if not is_own(key)]


def _is_in_database(manifest: Manifest) -> Callable[[str], object]:
    return re.compile(f"{MANIFEST}|{manifest.root}{DATABASE}").fullmatch


def _is_file(manifest: Manifest) -> Callable[[str], object]:
    keys = {MANIFEST, manifest.root + MANIFEST}
    pin = manifest.root + PIN
    for name, record in manifest.leaves.items():
        if record.is_array:
            keys.add(f"{manifest.root}{name}/{MANIFEST}")
            chunks = chunk_keys(record.data_shape, record.chunk_shape)
            keys.update(f"{manifest.root}{name}/{key}" for key in chunks)
    return lambda key: key in keys or bool(manifest.root) and key.startswith(pin)


# For each layout, a test of whether a key belongs to a checkpoint.
_OWN_KEYS: dict[Layout, Callable[[Manifest], Callable[[str], object]]] = {
    "zarr": _is_file,
    "ocdbt": _is_in_database,
}


def check_size(manifest: Manifest) -> None:
    """Raise `CheckpointError` if it will be too large with all checksums."""
    chunks = sum(
        record.data_shape == record.chunk_shape
        or chunk_count(record.data_shape, record.chunk_shape)
        for record in manifest.leaves.values()
        if record.is_array
    )
    _unsealed(manifest, CHECKSUM_DIGITS * chunks)


def to_bytes(manifest: Manifest) -> bytes:
    """Serialise a manifest, one leaf per line, so that `less`, `grep` and `diff` work.

    Raise `CheckpointError` if it exceeds what readers accept.
    """
    data = _unsealed(manifest)
    digest = hashlib.sha256(data).hexdigest()
    return data.replace(NO_DIGEST.encode(), digest.encode(), 1)


def _unsealed(manifest: Manifest, more: int = 0) -> bytes:
    """A manifest without its digest; raise if it is too large with `more` bytes."""
    numbers: dict[object, int] = {}
    types: list[str] = []
    leaves: list[str] = []
    for name, record in manifest.leaves.items():
        number = numbers.setdefault((record[:9], repr(record.sharding)), len(types))
        if number == len(types):
            types.append("\n" + json.dumps(_type_to_json(record), allow_nan=False))
        path = "".join([kind[0] for kind, _ in record.path])
        if "@" in name and is_cut(name):
            path = f"{path} {encode(record.path, uncut=True)}"
        text = "".join(record.checksums) if record.value is None else record.value
        leaves.append(f'\n"{name}": [{number}, "{path}", "{text}"]')
    optional: dict[str, Any] = {}
    if manifest.separators is not None:
        optional["separators"] = manifest.separators
    if manifest.history is not None:
        optional["history"] = history_to_json(manifest.history)
    part = "" if manifest.part is None else f'"part": {json.dumps(manifest.part)}'
    necessary = [part, references_to_text(manifest.references)]
    unsaved = [f'\n"{n}": {json.dumps(text)}' for n, text in manifest.unsaved.items()]
    metadata = None if manifest.metadata is None else pack(manifest.metadata)
    data = (
        '{"zarr_format": 3, "node_type": "group", "attributes": {"eqx_ckpt": {\n'
        f'"format_version": {manifest.format_version},\n'
        f'"digest": "{NO_DIGEST}",\n'
        f'"root": "{manifest.root}",\n'
        f'"layout": "{manifest.layout}",\n'
        f'"versions": {json.dumps(manifest.versions)},\n'
        f'"metadata": {json.dumps(metadata, allow_nan=False)},\n'
        f'"unsaved": {{{",".join(unsaved)}}},\n'
        f'"optional": {json.dumps(optional)},\n'
        f'"necessary": {{{", ".join(filter(None, necessary))}}},\n'
        f'"types": [{",".join(types)}],\n'
        f'"leaves": {{{",".join(leaves)}}}\n}}}}}}\n'
    ).encode()
    # No token has less than a byte, so a small manifest needs no look.
    is_large = len(data) + more > min(MAX_BYTES, MAX_TOKENS)
    if is_large and (problem := excess(data, more)):
        raise CheckpointError(
            f"Nothing was saved, because the manifest would be too large: {problem}. "
            "That is enough for two million leaves with names that are not long. Make "
            "one array of a list of numbers: `np.array(numbers)`."
        )
    return data


def _type_to_json(record: LeafRecord) -> dict[str, Any]:
    """The properties that leaves share, without those that can be derived."""
    if record.value is not None:
        return {"kind": record.kind}
    entry: dict[str, Any] = {
        "kind": record.kind,
        "dtype": record.dtype,
        "shape": record.shape,
        "chunk_shape": record.chunk_shape,
    }
    for name in ("impl", "weak_type", "sharding", "compression"):
        if getattr(record, name) != LeafRecord._field_defaults[name]:
            entry[name] = getattr(record, name)
    if record.data_type != record.dtype:
        entry["data_type"] = record.data_type
    if record.data_shape != record.shape:
        entry["data_shape"] = record.data_shape
    return entry


def excess(manifest: bytes, more: int = 0) -> str:
    """Say why a manifest would take readers too much memory; empty if it would not.

    `more`: bytes of checksums that it does not have yet.
    """
    if (nbytes := len(manifest) + more) > MAX_BYTES:
        return f"it has {nbytes} bytes, and readers take {MAX_BYTES}"
    tokens = sum(map(manifest.count, (b"[", b"{", b",", b":")))
    if tokens > MAX_TOKENS:
        return f"it has {tokens} values and keys, and readers take {MAX_TOKENS}"
    return ""


def check_array(record: LeafRecord) -> None:
    """Raise `CannotSave` for an array that readers would refuse."""
    # Equal to what is cached, but not the same, may be a float or an integer.
    if type(record.weak_type) is not bool or not is_sharding(record.sharding):
        raise CannotSave("has a `weak_type` or a `sharding` that no array has")
    sizes = (*record.shape, *record.data_shape, *record.chunk_shape)
    if {*map(type, sizes)} - {int}:
        raise CannotSave(f"has sizes that are not each an `int`: {sizes}")
    if problem := _problem(record[:9]):
        raise CannotSave(problem)


@ft.lru_cache(maxsize=4096)
def _problem(properties: tuple[Any, ...]) -> str:
    """What is wrong with an array, if anything; many arrays are alike.

    `properties`: the first nine fields of its record.
    """
    return next(_problems(LeafRecord(*properties)), "")


def _problems(record: LeafRecord) -> Iterator[str]:
    shape, chunk = record.data_shape, record.chunk_shape
    if record.kind not in ARRAY_KINDS:
        yield "is of no kind that an array has"
    if min((*record.shape, *shape, *chunk), default=0) < 0:
        yield f"has a negative size: its shape is {record.shape}"
    if record.compression not in (None, *COMPRESSIONS):
        yield "has an unknown compression"
    of_kind = _key_problems if record.kind == "key" else _other_problems
    yield from of_kind(record)
    rank = len(shape)
    if len(chunk) != rank or 0 in chunk:
        yield "has chunks that do not form a grid"
    if rank > _MAX_RANK:
        yield (
            f"has {rank} dimensions as it is stored, and Zarr arrays have {_MAX_RANK} "
            "at most; save a reshaped one"
        )
    limit = _MAX_ARRAY_BYTES // SIZES[record.data_type]
    if any(math.prod([n or 1 for n in of]) >= limit for of in (chunk, shape)):
        yield f"is too large: its shape is {shape}"


def _key_problems(record: LeafRecord) -> Iterator[str]:
    is_key = (record.dtype, record.data_type) == ("key", "uint32")
    if not is_key or type(record.impl) is not str or not record.impl.isascii():
        yield "is not a PRNG key"
    expected = key_shape(record.impl or "")
    if expected is not None and record.data_shape != record.shape + expected:
        yield "has the shape of a different PRNG implementation"


def _other_problems(record: LeafRecord) -> Iterator[str]:
    kind, dtype = record.kind, record.dtype
    is_plain = record.data_shape == record.shape
    if not is_plain or record.data_type != DATA_TYPES[dtype]:
        yield "has an array of a different dtype or shape"
    if kind == "jax" and dtype not in OF_JAX and dtype not in SIX_BITS:
        yield f"has the dtype `{dtype}`, which is not JAX's"
    if kind == "numpy_scalar" and record.shape:
        yield "is a scalar, and has a shape"
    if kind == "bytes" and (dtype != "uint8" or len(record.shape) != 1):
        yield "is not the bytes of a `filter_spec`"


def is_unsaved(name: Any, text: Any) -> bool:
    """Whether this can be one of the `unsaved`."""
    return isinstance(text, str) and is_encoded(name)


def is_separators(value: Any) -> bool:
    """Whether a manifest can have these `separators`."""
    return type(value) is str and len(value) <= _MOST_SEPARATORS


def is_sharding(value: Any) -> bool:
    """Whether this can be the `sharding` of a record."""
    if value is None:
        return True
    if type(value) is not dict:
        return False
    names, sizes, spec = (
        found if type(found := value.get(key)) is list else [...]
        for key in ("axis_names", "mesh_shape", "spec")
    )
    parts = [part if type(part) is list else [part] for part in spec]
    axes = [axis for part in parts for axis in part if axis is not None]
    return (
        len(names) == len(sizes)
        and all(isinstance(n, str | int) and not isinstance(n, bool) for n in names)
        and all(type(size) is int and size >= 0 for size in sizes)
        and all(axis in names for axis in axes)
        and len({*names}) == len(names)
        and len({*axes}) == len(axes)
        and type(value.get("memory_kind")) in (str, type(None))
    )
