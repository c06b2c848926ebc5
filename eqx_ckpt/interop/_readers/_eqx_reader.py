"""Files of `equinox.tree_serialise_leaves`."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import equinox
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._errors import CheckpointError, LeafMismatchError
from ..._format.leaf_names import encode, ROOT
from ..._format.leaf_record import (
    CannotSave,
    dtype_from_tag,
    LeafRecord,
    SCALAR_KINDS,
    scalar_to_text,
)
from ..._format.user_metadata import exactly
from ..._storage.calls.opening import reading
from ..._storage.calls.store_path import local_path
from ..._storage.directory.foreign_paths import file_of_equinox
from ..._storage.directory.local_file import LocalFile
from ..._storage.interface.foreign_file import read_bytes
from ..._tree.leaves.casting import narrowed
from ..._tree.leaves.filter_spec import checked_specs
from ..._tree.leaves.key_paths import key_paths, typed
from ..._tree.leaves.leaf_data import shards
from ..._tree.leaves.leaf_kinds import describe, describe_like, fingerprint
from ..._tree.leaves.skeleton import skeleton
from ..._tree.leaves.transient import is_transient, marked
from ..._tree.leaves.tree_prefix import fit_prefix
from ..._types import as_text, check_function, check_optional_integer, IsLeaf, PathLike
from ._file_extents import Extent, FileSource
from ._foreign_records import array_record, corrupt, manifest_of, Named
from ._npy_header import Npy, read_npy


FORMAT = "file of Equinox"


_MAGIC = b"\x93NUMPY"


_MAX_TEXT = 2**24


# Of a header, in an error.
_SHOWN = 200


# Far longer than the header of any array.
_MAX_HEADER = 2**14


def open_eqx(
    path: PathLike,
    like: PyTree,
    filter_spec: PyTree = equinox.default_deserialise_filter_spec,
    is_leaf: IsLeaf = None,
    *,
    header_lines: int | None = None,
) -> FileSource:
    """Open a file of `equinox.tree_serialise_leaves`.

    Such a file has no names: its leaves are in the order of `like`, and are given the
    names of its leaves. Opening reads headers only.

    **Arguments:**

    - `path`: the file; `.eqx` is added if there is no suffix, as in Equinox, unless
        there is a file without one.
    - `like`: a PyTree of the structure that was saved, of arrays or
        `jax.ShapeDtypeStruct`s. Or a function that makes it of the header of the file,
        such as the hyperparameters; its weights are not computed. The settings of a
        data loader are not in the file: they are those of its cursor in `like`.
    - `filter_spec`: as that of `equinox.tree_deserialise_leaves`. Leaves returned by a
        function other than the default are kept in memory; leaves that it returns
        unchanged are not part of the source, but for numbers that it has read.
    - `is_leaf`: as that of `equinox.tree_serialise_leaves`.
    - `header_lines`: how many lines of text precede the leaves, such as one of JSON
        with hyperparameters. Without it, all text before the first array does, unless a
        function other than the default has read something before.

    **Returns:**

    An [`eqx_ckpt.interop.Source`][], accepted wherever the path of a checkpoint is
    read. The lines that precede the leaves are its `manifest.metadata`: a dictionary or
    a list, if they are one in JSON, and otherwise their text.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no such file.
    - [`eqx_ckpt.LeafMismatchError`][]: a leaf differs from that of `like`. It is the
        first that does; leaves after it may agree by chance.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the file ends too early, or has no leaf
        where one should begin.
    - [`eqx_ckpt.CheckpointError`][]: the `filter_spec` fails.

    !!! example

        ```python
        import eqx_ckpt
        import equinox as eqx
        import jax

        model = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0))
        eqx.tree_serialise_leaves("model.eqx", model)
        source = eqx_ckpt.interop.open_eqx("model.eqx", model)
        layer = eqx_ckpt.tree_deserialise_leaves(
            source, model.layers[1], prefix="layers/1"
        )

        def make(header):
            return eqx.nn.MLP(2, 2, header["width"], 2, key=jax.random.key(0))

        with open("header.eqx", "wb") as f:
            f.write(b'{"width": 8}\\n')
            eqx.tree_serialise_leaves(f, model)
        source = eqx_ckpt.interop.open_eqx("header.eqx", make)
        assert source.manifest.metadata == {"width": 8}
        ```
    """
    text = as_text(path)
    if is_leaf is not None:
        check_function("is_leaf", is_leaf)
    file = LocalFile(file_of_equinox(local_path(text)))
    lines = check_optional_integer("header_lines", header_lines, 0)
    return _Leaves(file, like, filter_spec, is_leaf, lines).source()


class _Taken(NamedTuple):
    """A leaf of the source, and where its data are, if it is an array."""

    leaf: Named
    data: Extent | np.ndarray | None = None


class _Leaves:
    """The leaves of a file, one after another in the order of `like`."""

    def __init__(
        self,
        file: LocalFile,
        like: PyTree,
        filter_spec: PyTree,
        is_leaf: IsLeaf,
        header_lines: int | None,
    ) -> None:
        self._file = file
        self._leaves: list[Named] = []
        self._unsaved: dict[str, str] = {}
        self._extents: dict[str, Extent | np.ndarray] = {}
        with file.opened() as reads:
            self._reads = reads
            self._position = 0
            self._text: str | None = None
            self._seeks_text = header_lines is None
            if header_lines is not None or is_maker(like):
                self._take_text(header_lines)
                self._seeks_text = False
            if is_maker(like):
                like = self._made(like)
            for path, leaf, spec in _with_specs(like, filter_spec, is_leaf):
                name = encode(typed(path))
                if is_transient(leaf):
                    # What the file has of it is read, and dropped.
                    for rest, inner, its_spec in _in_transient(leaf, spec, is_leaf):
                        self._take((*path, *rest), inner, its_spec)
                    self._unsaved[name] = marked(leaf)
                else:
                    self._add(name, self._take(path, leaf, spec))
            if self._may_be_text:
                self._take_text()
        if self._position != file.size:
            raise LeafMismatchError(
                f"{file.path!r} has {file.size - self._position} bytes behind the last "
                "leaf of `like`. Pass the `like` that was saved, with all its leaves."
            )

    def source(self) -> FileSource:
        metadata = None if self._text is None else _parsed(self._text)
        manifest = manifest_of(self._leaves, self._file.path, metadata=metadata)
        # They are leaves of `like`: the file has nothing of them.
        manifest = replace(manifest, unsaved=self._unsaved)
        return FileSource(self._file.path, manifest, self._extents)

    def _made(self, make: Callable[[Any], PyTree]) -> PyTree:
        """The PyTree that a function makes of the header."""
        header = self._text
        if header is None:
            raise CheckpointError(
                f"{self._file.path!r} has no lines before its leaves, and `like` is a "
                "function of them. Pass the PyTree that was saved."
            )
        try:
            return skeleton(make, _parsed(header))
        except Exception as e:
            raise CheckpointError(
                f"`like` raised `{type(e).__name__}` for the header of "
                f"{self._file.path!r}, {header[:_SHOWN]!r}: {e}"
            ) from e

    @property
    def _may_be_text(self) -> bool:
        """Whether nothing has been read, and nobody said how much of it is text."""
        return self._seeks_text and self._position == 0

    def _take_text(self, lines: int | None = None) -> None:
        """Take lines of text, or all text before the first array."""
        head = read_bytes(self._reads, 0, min(self._file.size, _MAX_TEXT))
        end = _first_array(head) if lines is None else self._end_of(lines, head)
        try:
            self._text = head[:end].decode() or None
        except UnicodeDecodeError:
            reason = f"it has {end} bytes before its first leaf, which are not text"
            raise corrupt(self._file.path, FORMAT, reason) from None
        self._position = end

    def _end_of(self, lines: int, head: bytes) -> int:
        *found, _ = head.split(b"\n", lines)
        if len(found) < lines:
            reason = f"it has {len(found)} lines, and `header_lines` is {lines}"
            raise corrupt(self._file.path, FORMAT, reason)
        return sum(len(line) + 1 for line in found)

    def _add(self, name: str, taken: _Taken | str) -> None:
        if isinstance(taken, str):
            self._unsaved[name] = taken
            return
        self._leaves.append(taken.leaf)
        if taken.data is not None:
            self._extents[name] = taken.data

    def _take(
        self, path: Any, leaf: Any, spec: Callable[[Any, Any], Any]
    ) -> _Taken | str:
        """Go past a leaf; a text says what it is, if it is not part of the source."""
        keys, where = typed(path), jtu.keystr(path) or ROOT
        if spec is not equinox.default_deserialise_filter_spec:
            return self._take_custom(where, leaf, spec, keys)
        expected = describe_like(leaf)
        if expected is None:
            return fingerprint(leaf)
        # What a custom function has read from the start of the file was no text.
        if self._may_be_text:
            self._take_text()
        npy = self._header(where)
        offset = self._position + npy.header_nbytes
        self._position = offset + npy.nbytes
        if self._position > self._file.size:
            reason = f"it ends within the leaf `{where}`"
            raise corrupt(self._file.path, FORMAT, reason)
        try:
            record = _record(expected, npy)._replace(path=keys)
        except (CannotSave, ValueError) as e:
            raise LeafMismatchError(
                f"The first leaf of {self._file.path!r} that differs from `like` is "
                f"`{where}`: {expected} in `like`, {npy.descr}{[*npy.shape]} in the "
                f"file ({e}). The file has no names: pass the `like` that was saved."
            ) from None
        if record.kind in SCALAR_KINDS:
            data = read_bytes(self._reads, offset, npy.nbytes)
            value = np.frombuffer(data, npy.dtype)[0].item()
            record = record._replace(value=scalar_to_text(value))
            return _Taken(Named(where, record))
        extent = Extent(self._file, offset, npy.is_fortran, npy.is_big_endian)
        return _Taken(Named(where, record), extent)

    def _take_custom(
        self, where: str, leaf: Any, spec: Callable[[Any, Any], Any], keys: Any
    ) -> _Taken | str:
        """Read a leaf through a custom function, which may stop anywhere."""
        with reading(self._file.path) as f:
            f.seek(self._position)
            try:
                value = spec(f, leaf)
            except Exception as e:
                hint = " If lines of text precede the leaves, pass `header_lines`."
                raise CheckpointError(
                    f"The `filter_spec` failed for the leaf `{where}` at byte "
                    f"{self._position} of {self._file.path!r}: {e}"
                    f"{'' if self._position else hint}"
                ) from e
            has_read = f.tell() != self._position
            self._position = f.tell()
        # Python has equal numbers as one object, also if one of them was read.
        is_number = isinstance(leaf, bool | int | float | complex)
        is_skipped = value is leaf and not (is_number and has_read)
        try:
            record = None if is_skipped else describe(value)
        except CannotSave as e:
            raise CheckpointError(
                f"The `filter_spec` returned a leaf `{where}` that {e}."
            ) from None
        if record is None:
            return f"skipped: {describe_like(leaf) or fingerprint(leaf)}"
        data = _in_memory(value, record) if record.is_array else None
        return _Taken(Named(where, record._replace(path=keys)), data)

    def _header(self, where: str) -> Npy:
        try:
            nbytes = min(_MAX_HEADER, self._file.size - self._position)
            f = io.BytesIO(read_bytes(self._reads, self._position, nbytes))
            npy = read_npy(f.read)
        except (ValueError, NotImplementedError) as e:
            reason = f"at byte {self._position}, where `{where}` should begin: {e}"
            raise corrupt(self._file.path, FORMAT, reason) from None
        if npy.is_pickled:
            raise CheckpointError(
                f"The leaf `{where}` of {self._file.path!r} is pickled, and nothing is "
                "unpickled here: it was an integer of more than 64 bits, perhaps."
            )
        return npy


def is_maker(like: Any) -> bool:
    """Whether a `like` is a function that makes it, and not a PyTree to be called."""
    return callable(like) and jtu.all_leaves([like])


def _parsed(text: str) -> Any:
    """A header in JSON as a dictionary or list; any other one as it is."""
    try:
        value = exactly(json.loads(text, object_pairs_hook=_dictionary))
    except (ValueError, TypeError, RecursionError, CheckpointError):
        return text
    return value if isinstance(value, dict | list) else text


def _dictionary(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _with_specs(like: PyTree, filter_spec: PyTree, is_leaf: IsLeaf) -> Any:
    """Every leaf with its key path, and the function that reads it."""
    specs = checked_specs(filter_spec)
    _, nodes = fit_prefix(filter_spec, like, is_leaf)
    for (path, spec), node in zip(specs, nodes, strict=True):
        for rest, leaf in key_paths(node, is_leaf):
            yield (*path, *rest), leaf, spec


def _in_transient(node: Any, filter_spec: PyTree, is_leaf: IsLeaf) -> Any:
    """The same for the leaves in a `Transient`, where `filter_spec` may be one, too."""
    specs, structure = jtu.tree_flatten(filter_spec)
    each = [
        spec
        for spec, inner in zip(specs, structure.flatten_up_to(node), strict=True)
        for _ in jtu.tree_leaves(inner, is_leaf)
    ]
    leaves = jtu.tree_flatten_with_path(node, is_leaf)[0]
    return ((path, leaf, spec) for (path, leaf), spec in zip(leaves, each, strict=True))


def _first_array(head: bytes) -> int:
    """Where the first array begins: at the start of a line; or the end."""
    if head.startswith(_MAGIC):
        return 0
    return head.find(b"\n" + _MAGIC) + 1 or len(head)


def _record(expected: LeafRecord, npy: Npy) -> LeafRecord:
    """The record of a leaf in the file; `ValueError` if it differs from `like`."""
    if expected.shape != npy.shape:
        raise ValueError("the shapes differ")
    if expected.kind in SCALAR_KINDS:
        kind = {"b": "bool", "i": "int", "u": "int", "f": "float", "c": "complex"}
        # Python has no number as wide as a `longdouble`.
        if kind.get(npy.dtype.kind) != expected.kind or npy.dtype.char in "gG":
            raise ValueError("the types differ")
        return LeafRecord(expected.kind)
    if expected.kind not in ("jax", "numpy", "numpy_scalar", "struct"):
        raise ValueError("Equinox does not save that")
    wanted = dtype_from_tag(expected.dtype)
    found = npy.dtype
    if found.kind == "V" and wanted.isbuiltin == 2:
        # NumPy does not store the names of JAX's dtypes.
        found = wanted if found.itemsize == wanted.itemsize else found
    record = array_record(found, npy.shape, ())
    is_narrowed = expected.kind == "struct" and (
        narrowed(record.dtype) == expected.dtype
    )
    if record.dtype != expected.dtype and not is_narrowed:
        raise ValueError("the dtypes differ")
    return record if expected.kind == "struct" else record._replace(kind=expected.kind)


def _in_memory(leaf: Any, record: LeafRecord) -> np.ndarray:
    array = np.empty(record.data_shape, record.data_type)
    for region, data in shards(leaf, record):
        array[region] = data
    return array
