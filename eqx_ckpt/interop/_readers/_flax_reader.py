"""Files of `flax.serialization.to_bytes`, which are msgpack."""

import bisect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..._format.leaf_names import encode
from ..._format.leaf_record import CannotSave, LeafRecord, scalar_to_text
from ..._storage.directory.local_file import LocalFile
from ..._storage.interface.foreign_file import read_exactly, Reads
from ..._tree.leaves.leaf_kinds import fingerprint
from ..._types import PathLike, TypedPath
from ._file_extents import Extent, FileSource, ReadInto
from ._foreign_records import array_record, corrupt, manifest_of, Named, position_or_key
from ._msgpack_walker import Blob, MAX_DEPTH, Walker


FORMAT = "msgpack of flax"


_NDARRAY, _COMPLEX, _SCALAR = 1, 2, 3


_CHUNKED = "__msgpack_chunked_array__"


# Of a leaf: in a large array, two dictionaries are below it.
MAX_LEVELS = MAX_DEPTH - 2


_DTYPE = re.compile(r"[a-z][a-z0-9_]{1,24}(\[\d{0,6}[a-zA-Z]{1,2}\])?")


def open_flax(path: PathLike) -> FileSource:
    """Open a file of `flax.serialization.to_bytes` or `msgpack_serialize`.

    The keys of its dictionaries are the parts of names; keys of digits, which flax
    makes from positions in lists, become positions again. Opening does not read the
    data of arrays.

    **Arguments:**

    - `path`: the file.

    **Returns:**

    An [`eqx_ckpt.interop.Source`][], accepted wherever the path of a checkpoint is
    read. 64-bit arrays are restored as NumPy arrays, unless `like` has JAX arrays.
    Strings and bytes are listed in `manifest.unsaved`.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no such file.
    - [`eqx_ckpt.CorruptCheckpointError`][]: it is not msgpack, or was not written by
        flax.

    !!! example

        ```python
        import eqx_ckpt
        import flax.serialization
        import jax.numpy as jnp

        params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}}
        with open("params.msgpack", "wb") as f:
            f.write(flax.serialization.to_bytes(params))
        source = eqx_ckpt.interop.open_flax("params.msgpack")
        tree = eqx_ckpt.tree_deserialise_leaves(source, params)
        ```
    """
    file = LocalFile(path)
    with file.opened() as reads:
        try:
            walker = Walker(reads, 0, file.size)
            tree = walker.object()
            if walker.position != file.size:
                raise ValueError(f"its first object ends at byte {walker.position}")
            found = list(_leaves(reads, tree, ()))
        except (ValueError, EOFError, RecursionError) as e:
            raise corrupt(file.path, FORMAT, str(e)) from None
    leaves: list[Named] = []
    extents: dict[str, Extent] = {}
    unsaved: dict[str, str] = {}
    for leaf in found:
        name = encode(leaf.keys)
        if isinstance(leaf.record, str):
            unsaved[name] = leaf.record
            continue
        leaves.append(Named(name, leaf.record._replace(path=leaf.keys)))
        if leaf.record.is_array:
            starts, offsets = leaf.pieces
            extents[name] = _Pieces(file, offsets[0], starts=starts, offsets=offsets)
    manifest = manifest_of(leaves, file.path, unsaved=unsaved, separators="")
    return FileSource(file.path, manifest, extents)


@dataclass(frozen=True, kw_only=True)
class _Pieces(Extent):
    """An array in several pieces, in order, with gaps between them."""

    starts: tuple[int, ...]
    offsets: tuple[int, ...]

    def opened(self, reads: Reads) -> ReadInto:
        def read(start: int, target: memoryview) -> None:
            i = bisect.bisect_right(self.starts, start) - 1
            while target:
                more = self.starts[i + 1] - start if i + 1 < len(self.starts) else None
                part = target[:more]
                offset = self.offsets[i] + start - self.starts[i]
                read_exactly(reads, offset, part)
                target, start, i = target[len(part) :], start + len(part), i + 1

        return read


class _Leaf(NamedTuple):
    """A leaf of the tree; its record is the reason, as text, if it cannot be restored.

    `pieces` are where parts of it start, in the array, and in the file.
    """

    keys: TypedPath
    record: LeafRecord | str
    pieces: tuple[tuple[int, ...], tuple[int, ...]] = ((0,), (0,))


def _leaves(reads: Reads, tree: Any, keys: TypedPath) -> Iterator[_Leaf]:
    if isinstance(tree, dict):
        if _CHUNKED in tree:
            yield _chunked(reads, tree, keys)
            return
        for key, value in tree.items():
            yield from _leaves(reads, value, (*keys, position_or_key(str(key))))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from _leaves(reads, value, (*keys, ("index", i)))
    elif isinstance(tree, Blob):
        yield _extension(reads, tree, keys)
    elif isinstance(tree, bool | int | float):
        kind = type(tree).__name__
        yield _Leaf(keys, LeafRecord(kind, value=scalar_to_text(tree)))
    elif tree is not None:
        yield _Leaf(keys, fingerprint(tree))


def _extension(reads: Reads, blob: Blob, keys: TypedPath) -> _Leaf:
    if blob.code == _COMPLEX:
        parts = Walker(reads, blob.start, blob.start + blob.nbytes).object()
        if not isinstance(parts, list) or [*map(type, parts)] != [float, float]:
            raise ValueError(f"the number {encode(keys)[:200]!r} is not complex")
        value = complex(*parts)
        return _Leaf(keys, LeafRecord("complex", value=scalar_to_text(value)))
    if blob.code not in (_NDARRAY, _SCALAR):
        kind = "bytes" if blob.code is None else f"a msgpack extension {blob.code}"
        return _Leaf(keys, f"{blob.nbytes} bytes, {kind}")
    shape, dtype, data = _array(reads, blob, keys)
    try:
        record = array_record(dtype, shape, keys)
    except CannotSave as e:
        return _Leaf(keys, f"an array that {e}")
    if blob.code == _SCALAR:
        record = record._replace(kind="numpy_scalar")
    return _Leaf(keys, record, ((0,), (data.start,)))


def _array(reads: Reads, blob: Any, keys: TypedPath) -> tuple[Any, np.dtype, Blob]:
    where = f"the array {encode(keys)[:200]!r}"
    if not isinstance(blob, Blob) or blob.code not in (_NDARRAY, _SCALAR):
        raise ValueError(f"{where} is not an array")
    parts = Walker(reads, blob.start, blob.start + blob.nbytes).object()
    try:
        shape, name, data = parts
        if not isinstance(shape, list) or not isinstance(data, Blob):
            raise TypeError("it is no shape, dtype and data")
        if not _DTYPE.fullmatch(name):
            raise TypeError("its dtype is not one")
        # NumPy knows the names of JAX's dtypes, such as `bfloat16`.
        dtype = np.dtype(name)
        if not all(type(n) is int and 0 <= n < 2**62 for n in shape) or shape[32:]:
            raise TypeError("its shape is not one")
        if dtype.hasobject or math.prod(shape) * dtype.itemsize != data.nbytes:
            raise TypeError("its size does not follow from its shape")
    except (TypeError, ValueError, AttributeError) as e:
        raise ValueError(f"{where} is {str(parts)[:200]}: {e}") from None
    return tuple(shape), dtype, data


def _chunked(reads: Reads, tree: dict[Any, Any], keys: TypedPath) -> _Leaf:
    """An array of more than a GiB, which flax cuts into flat ones."""
    try:
        shape = tuple(tree["shape"][str(i)] for i in range(len(tree["shape"])))
        chunks = [tree["chunks"][str(i)] for i in range(len(tree["chunks"]))]
        parts = [_array(reads, chunk, keys) for chunk in chunks]
        dtypes = {dtype for _, dtype, _ in parts}
        total = sum(data.nbytes for *_, data in parts)
        if not all(type(n) is int and 0 <= n < 2**62 for n in shape) or shape[32:]:
            raise ValueError("its shape is not one")
        if len(dtypes) != 1 or math.prod(shape) * min(dtypes).itemsize != total:
            raise ValueError("its chunks do not make up its shape")
        record = array_record(dtypes.pop(), shape, keys)
    except (KeyError, TypeError, ValueError, AttributeError, CannotSave) as e:
        raise ValueError(f"the array {encode(keys)[:200]!r}: {e}") from None
    starts = [0]
    for *_, data in parts[:-1]:
        starts.append(starts[-1] + data.nbytes)
    offsets = tuple(data.start for *_, data in parts)
    return _Leaf(keys, record, (tuple(starts), offsets))
