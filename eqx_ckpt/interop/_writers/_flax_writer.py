"""Writing msgpack as `flax.serialization` does."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..._errors import CheckpointError
from ..._format.leaf_record import LeafRecord, plain_dtype
from ..._format.manifest import Manifest
from ..._format.source import Source
from ..._inspecting.inspect_checkpoint import read_manifest
from ..._storage.calls.opening import reading
from ..._storage.interface.output_files import NewFiles
from ..._storage.interface.replacing import Kind, opened_by
from ..._types import PathLike
from .._readers._flax_reader import MAX_LEVELS, open_flax
from ._export_checks import (
    check_leaves,
    Form,
    in_order,
    INTEGERS,
    key_texts,
    losses,
    plain,
    raw,
)


# As flax splits arrays: msgpack holds at most 2**32 bytes in one value.
CHUNK_BYTES = 2**30


_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3


_Node = dict[str, Any]


def to_flax(
    source: PathLike | Source,
    path: PathLike,
    *,
    strict: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint, or any source, as `flax.serialization.to_bytes` would.

    The tree becomes nested dictionaries, and positions become keys such as `"0"`, as in
    flax: `flax.serialization.from_bytes(target, data)` restores it. One leaf at a time
    is in memory.

    **Arguments:**

    - `source`: as [`eqx_ckpt.interop.to_safetensors`][].
    - `path`: the file, such as `"params.msgpack"`.
    - `strict`: raise, instead of warning once, if something is lost: PRNG keys become
        their data, all arrays become NumPy's, and shardings, weak types, metadata
        and the settings of data loaders are left out.
    - `overwrite`: replace an existing file of this format, and no other.

    **Returns:**

    The file.

    **Raises:**

    - [`eqx_ckpt.CheckpointError`][]: msgpack cannot hold a leaf; nothing is written.
    - [`eqx_ckpt.CheckpointExistsError`][]: the file exists already.
    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.

    !!! example

        ```python
        import eqx_ckpt
        import flax.serialization
        import jax.numpy as jnp

        params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
        eqx_ckpt.tree_serialise_leaves("ckpt", params)
        file = eqx_ckpt.interop.to_flax("ckpt", "params.msgpack")
        params = flax.serialization.from_bytes(params, file.read_bytes())
        ```
    """
    manifest = read_manifest(source)
    new_file = NewFiles([path], _KIND, overwrite=overwrite)
    check_leaves(
        manifest,
        Form("msgpack of flax", "", INTEGERS),
        _problem,
        lambda record: losses(record, keeps_numbers=True, keeps_numpy=True),
        strict=strict,
    )
    tree = _nested(manifest)
    values = in_order(source, list(_names(tree)))
    with new_file as new, new.next() as f:
        _write(f, tree, values)
    return Path(new.paths[0])


def _read(path: str) -> None:
    with reading(path) as f:
        # A text could be a small number.
        if f.read(1).isascii():
            raise CheckpointError("It does not begin as msgpack of flax.")
    open_flax(path)


_KIND = Kind("msgpack of flax", opened_by(_read))


def _nested(manifest: Manifest) -> _Node | str:
    """The names of the leaves, in nested dictionaries."""
    tree: _Node = {}
    for name, record in manifest.leaves.items():
        if not record.path:
            return name
        *folders, last = key_texts(record)
        node = tree
        for key in folders:
            node = node.setdefault(key, {}) if isinstance(node, dict) else node
        if not isinstance(node, dict) or last in node:
            raise CheckpointError(
                f"Nothing was written: {name!r} would take the place of another leaf."
            )
        node[last] = name
    return tree


def _names(tree: _Node | str) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
        return
    for node in tree.values():
        yield from _names(node)


def _write(
    f: BinaryIO, tree: _Node | str, values: Iterator[tuple[str, LeafRecord, Any]]
) -> None:
    if isinstance(tree, str):
        _, record, value = next(values)
        _write_leaf(f, record, value)
        return
    f.write(_head(_MAP, len(tree)))
    for key, node in tree.items():
        f.write(_text(key))
        _write(f, node, values)


def _write_leaf(f: BinaryIO, record: LeafRecord, value: Any) -> None:
    if record.kind == "bool":
        f.write(b"\xc3" if value else b"\xc2")
    elif record.kind == "int":
        is_long = value >= 2**63
        f.write(
            struct.pack(">BQ" if is_long else ">Bq", 0xCF if is_long else 0xD3, value)
        )
    elif record.kind == "float":
        f.write(struct.pack(">Bd", 0xCB, value))
    elif record.kind == "complex":
        numbers = struct.pack(">BBdBd", 0x92, 0xCB, value.real, 0xCB, value.imag)
        f.write(_extension(_COMPLEX, len(numbers)) + numbers)
    else:
        code = _SCALAR if record.kind == "numpy_scalar" else _NDARRAY
        _write_array(f, plain(record, value), code)


def _write_array(f: BinaryIO, array: np.ndarray, code: int) -> None:
    if array.nbytes <= CHUNK_BYTES:
        head = _head(_ARRAY, 3) + _head(_ARRAY, array.ndim)
        head += b"".join(map(_number, array.shape))
        head += _text(array.dtype.name) + _head(_BYTES, array.nbytes)
        f.write(_extension(code, len(head) + array.nbytes) + head)
        f.write(raw(array))
        return
    step = CHUNK_BYTES // array.itemsize
    flat = array.reshape(-1)
    chunks = [flat[i : i + step] for i in range(0, flat.size, step)]
    f.write(_head(_MAP, 3) + _text("__msgpack_chunked_array__") + b"\xc3")
    f.write(_text("shape") + _head(_MAP, array.ndim))
    for i, size in enumerate(array.shape):
        f.write(_text(str(i)) + _number(size))
    f.write(_text("chunks") + _head(_MAP, len(chunks)))
    for i, chunk in enumerate(chunks):
        f.write(_text(str(i)))
        _write_array(f, chunk, code)


# The first bytes of each kind, for lengths of two bytes and of four.
_MAP, _ARRAY, _BYTES, _TEXT = (0xDE, 0xDF), (0xDC, 0xDD), (0xC5, 0xC6), (0xDA, 0xDB)


def _head(kind: tuple[int, int], count: int) -> bytes:
    short, long = kind
    return (
        struct.pack(">BH", short, count)
        if count < 2**16
        else struct.pack(">BI", long, count)
    )


def _text(text: str) -> bytes:
    data = text.encode()
    return _head(_TEXT, len(data)) + data


def _number(number: int) -> bytes:
    return struct.pack(">BQ", 0xCF, number)


def _extension(code: int, nbytes: int) -> bytes:
    return struct.pack(">BIb", 0xC9, nbytes, code)


def _problem(_: str, record: LeafRecord) -> str | None:
    if len(record.path) > MAX_LEVELS:
        return f"a name of {len(record.path)} keys, of which {MAX_LEVELS} can be read"
    dtype = plain_dtype(record)
    if dtype.kind in "mM":
        return f"the dtype `{dtype}`"
    return None
