"""Safetensors files: one, or several with an index, as Hugging Face writes them."""

import math
import re
from typing import Any, NamedTuple

import numpy as np

from ..._errors import CheckpointError, CheckpointNotFoundError
from ..._format.leaf_names import encode
from ..._format.leaf_record import CannotSave
from ..._storage.calls.store_path import StorePath
from ..._storage.calls.worker_threads import MAX_IN_FLIGHT, SMALL, Workers
from ..._storage.interface.foreign_file import ForeignFile, read_bytes
from ..._storage.locate import locate_file, names_in
from ..._types import as_text, PathLike
from ._file_extents import Extent, FileSource
from ._foreign_records import (
    array_record,
    corrupt,
    manifest_of,
    Named,
    parse_object,
    split,
)


FORMAT = "safetensors file"


SEPARATORS = "."


# As in the safetensors library.
MAX_HEADER_BYTES = 100_000_000


_MAX_INDEX_BYTES = MAX_HEADER_BYTES


_MAX_RANK = 32


# By name: NumPy knows those of JAX's own dtypes.
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


DTYPES = {name: np.dtype(dtype) for name, dtype in _NAMES.items()}


# Several elements share a byte, in an order that the format does not define.
_PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


# Behind the name of the file that was split.
INDEX = ".index.json"


def open_safetensors(path: PathLike) -> FileSource:
    """Open a file of safetensors, or a directory with several of them and an index.

    Names are split at `.`, and digits become positions: `"model.layers.0.weight"` is
    the leaf `model/layers/0/weight`. Opening reads headers only; a restore reads the
    regions that it needs.

    **Arguments:**

    - `path`: a `.safetensors` file, a `.safetensors.index.json` of Hugging Face, or a
        directory that has one of them; or a URL of one: `s3://`, `gs://`, or `https://`
        of a server that sends parts of files, which has no directories.

    **Returns:**

    An [`eqx_ckpt.interop.Source`][], accepted wherever the path of a checkpoint is
    read. `manifest.metadata` is the `__metadata__` of the file, or of all files of an
    index, and that of the index where these have none, or differ. 64-bit arrays are
    restored as NumPy arrays, unless `like` has JAX arrays. Tensors of the dtypes `F4`
    and `F6`, whose elements share bytes, are listed in `manifest.unsaved` and cannot be
    restored.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no such file.
    - [`eqx_ckpt.CorruptCheckpointError`][]: a header or the index is not valid.
    - [`eqx_ckpt.LeafNameError`][]: after splitting, two names are equal, or one is
        inside another.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp
        import numpy as np
        from safetensors.numpy import save_file

        save_file({"layers.0.weight": np.ones((2, 3), np.float32)}, "w.safetensors")
        weights = eqx_ckpt.interop.open_safetensors("w.safetensors")
        like = {"layers": [{"weight": jnp.zeros((2, 3))}]}
        model = eqx_ckpt.tree_deserialise_leaves(weights, like)
        ```
    """
    file = _file_of(path)
    if file.path.partition("?")[0].endswith(".json"):
        return _sharded(file)
    header = read_header(file)
    return _source(file.path, {file: header}, header.metadata)


class Tensor(NamedTuple):
    """A tensor's entry in the header; `start` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    tensors: dict[str, Tensor]
    metadata: dict[str, str] | None


def _file_of(path: PathLike) -> ForeignFile:
    """The file at a path or URL, or the only one in a folder."""
    text = as_text(path)
    is_name = "://" in text and text.endswith((".safetensors", INDEX))
    names = None if is_name else names_in(path)
    if names is None:
        return locate_file(path)
    name = _only_one(text, names)
    if isinstance(path, StorePath):
        return locate_file(path / name)
    return locate_file(f"{text.rstrip('/')}/{name}")


def _only_one(folder: str, names: list[str]) -> str:
    for ending in (f".safetensors{INDEX}", ".safetensors"):
        found = [name for name in names if name.endswith(ending)]
        # A file beside its index has other weights: one of them is from before.
        found += [n for f in found if (n := f.removesuffix(INDEX)) in names and n != f]
        if len(found) == 1:
            return found[0]
        if found:
            raise CheckpointError(
                f"{folder!r} has {', '.join(map(repr, found[:5]))}"
                f"{', ...' if len(found) > 5 else ''}: pass one of them."
            )
    raise CheckpointNotFoundError(f"There is no safetensors file in {folder!r}.")


def _source(
    place: str, headers: dict[ForeignFile, Header], metadata: Any
) -> FileSource:
    leaves: list[Named] = []
    extents: dict[str, Extent] = {}
    unsaved: dict[str, str] = {}
    for file, header in headers.items():
        for text, tensor in header.tensors.items():
            path = split(text, SEPARATORS)
            if tensor.dtype in _PACKED:
                shape = ", ".join(map(str, tensor.shape))
                unsaved[encode(path)] = f"{tensor.dtype}[{shape}] of safetensors"
                continue
            try:
                record = array_record(DTYPES[tensor.dtype], tensor.shape, path)
            except CannotSave as e:
                raise corrupt(place, FORMAT, f"{text[:200]!r} {e}") from None
            leaves.append(Named(text, record))
            extents[encode(path)] = Extent(file, tensor.start)
    manifest = manifest_of(
        leaves, place, unsaved=unsaved, metadata=metadata, separators=SEPARATORS
    )
    return FileSource(place, manifest, extents)


def _sharded(index: ForeignFile) -> FileSource:
    """The tensors of all files of an index, each in the file that it names."""
    weight_map, metadata = read_index(index)
    by_file: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        by_file.setdefault(shard, set()).add(name)
    opened: dict[str, tuple[ForeignFile, Header]] = {}

    def opened_shard(shard: str) -> tuple[ForeignFile, Header]:
        file = _shard_file(index, shard)
        return file, _part(file, by_file[shard], weight_map, index.path)

    # Several at a time, as stores answer late.
    with Workers(opened_shard, MAX_IN_FLIGHT, opened.__setitem__) as workers:
        for shard in by_file:
            workers.put(shard, SMALL)
        workers.finish()
    headers = dict(opened[shard] for shard in by_file)
    first, *others = [header.metadata for header in headers.values()] or [None]
    shared = first if all(other == first for other in others) else None
    return _source(index.path, headers, shared or metadata)


def read_index(file: ForeignFile) -> tuple[dict[str, str], Any]:
    """The file of each tensor, and the metadata, of an index."""
    place = file.path
    try:
        index = parse_object(file.whole(_MAX_INDEX_BYTES), place, "index")
    except ValueError as e:
        raise corrupt(place, "index", str(e)) from None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise corrupt(place, "index", "it has no `weight_map`")
    for name, shard in weight_map.items():
        # Nothing outside of this folder: an index may come from anywhere.
        is_name = isinstance(shard, str) and re.fullmatch(r"[^/\\\0]+", shard)
        if not is_name or shard in (".", ".."):
            raise corrupt(place, "index", f"{name[:200]!r} is in {str(shard)[:200]!r}")
    return weight_map, index.get("metadata")


def _shard_file(index: ForeignFile, shard: str) -> ForeignFile:
    try:
        return index.beside(shard)
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(
            f"{index.path!r} names the file {shard!r}, which is not there."
        ) from None


def _part(
    file: ForeignFile, names: set[str], weight_map: dict[str, Any], place: str
) -> Header:
    """The tensors that the index takes from one file."""
    tensors, metadata = read_header(file)
    missing = sorted(names - tensors.keys())
    unknown = sorted(tensors.keys() - weight_map.keys())
    for problem, found in (("lacks", missing), ("has in addition", unknown)):
        if found:
            shown = ", ".join(map(repr, found[:5])) + (", ..." if found[5:] else "")
            raise corrupt(place, "index", f"{file.path!r} {problem} {shown}")
    return Header({name: tensors[name] for name in tensors if name in names}, metadata)


def read_header(file: ForeignFile) -> Header:
    """The tensors of a file, from its checked header."""
    size = math.inf if file.size is None else file.size
    if size < 10:
        raise corrupt(file.path, FORMAT, f"it has {size} bytes")
    with file.opened() as reads:
        nbytes = int.from_bytes(read_bytes(reads, 0, 8), "little")
        told = f"its header should have {nbytes} bytes"
        if nbytes > min(MAX_HEADER_BYTES, size - 8):
            has = "" if file.size is None else f"it has {size} bytes, and "
            raise corrupt(file.path, FORMAT, has + told)
        try:
            data = read_bytes(reads, 8, nbytes)
        except EOFError:
            raise corrupt(file.path, FORMAT, f"it is shorter, and {told}") from None
    entries = parse_object(data, file.path, FORMAT)
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict)
        and all(isinstance(value, str) for value in metadata.values())
    ):
        raise corrupt(file.path, FORMAT, "its metadata are not strings")
    tensors = {
        name: _tensor(name, entry, 8 + nbytes, file) for name, entry in entries.items()
    }
    _check_order(tensors, 8 + nbytes, file)
    return Header(tensors, metadata)


def _tensor(name: str, entry: Any, data_start: int, file: ForeignFile) -> Tensor:
    try:
        if entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"it has the keys {sorted(entry)}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if dtype not in DTYPES and dtype not in _PACKED:
            raise ValueError("its dtype is not known")
        start, stop = offsets
        if len(shape) > _MAX_RANK:
            raise ValueError("it has too many dimensions")
        for number in (start, stop, *shape):
            if type(number) is not int or not 0 <= number < 2**62:
                raise ValueError(f"{number!r} is not a size")
        bits = _PACKED.get(dtype) or 8 * DTYPES[dtype].itemsize
        if math.prod(shape) * bits != 8 * (stop - start):
            raise ValueError("its size does not follow from its shape")
        if file.size is not None and stop > file.size - data_start:
            raise ValueError("it ends behind the end of the file")
        return Tensor(dtype, tuple(shape), data_start + start, data_start + stop)
    except (ValueError, TypeError, AttributeError) as e:
        reason = f"the tensor {name[:200]!r} is {str(entry)[:200]}: {str(e)[:200]}"
        raise corrupt(file.path, FORMAT, reason) from None


def _check_order(tensors: dict[str, Tensor], end: int, file: ForeignFile) -> None:
    """Check that tensors follow one another without gaps, as the format requires."""
    by_start = sorted(tensors.items(), key=lambda item: item[1][2:])
    for name, tensor in by_start:
        if tensor.start != end:
            problem = "overlaps another one" if tensor.start < end else "follows a hole"
            reason = f"the tensor {name[:200]!r} {problem}"
            raise corrupt(file.path, FORMAT, reason)
        end = tensor.stop
    if problem := file.end_problem(end):
        reason = f"its tensors end at byte {end}, and {problem}"
        raise corrupt(file.path, FORMAT, reason)
