"""Write checkpoints of Orbax, with Orbax, one leaf at a time."""

import asyncio
import contextlib
import errno
import os
import re
from collections.abc import Callable, Container, Generator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from ..._errors import CheckpointError, CorruptCheckpointError
from ..._format.dtype_names import STORED
from ..._format.leaf_record import (
    LeafRecord,
    plain_dtype,
    scalar_from_text,
    SCALAR_KINDS,
)
from ..._format.manifest import Manifest
from ..._format.source import Source
from ..._sources.checkpoint_source import opened
from ..._storage.calls.opening import make_folder, open_folder, path_through
from ..._storage.calls.posix_calls import delete, exchange, flush
from ..._storage.calls.safe_files import list_files, writing_to
from ..._storage.calls.store_path import local_path
from ..._storage.calls.tensorstore_calls import os_error_of, translated
from ..._storage.interface.attempt_lock import locked_attempt
from ..._storage.interface.replacing import already_there, is_replacement, Kind
from ..._tree.matching.name_tree import nested, sortable
from ..._types import PathLike
from .._readers._orbax_reader import open_orbax
from ._export_checks import check_leaves, Form, in_order, INT64, key_texts, losses


# Those that lead to a node of a tree, without their kinds.
_Keys: TypeAlias = tuple[str | int, ...]


# What it writes for a PyTree whose arrays are in one database.
_OF_ORBAX = re.compile(
    r"_CHECKPOINT_METADATA|_METADATA|_sharding|_strings\.json|commit_success\.txt"
    r"|descriptor/.*|array_metadatas/process_\d+"
    r"|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/[0-9a-f]{32})"
)


def to_orbax(
    source: PathLike | Source,
    path: PathLike,
    *,
    strict: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint, or any source, for `orbax.checkpoint.StandardCheckpointer`.

    The tree becomes nested dictionaries, and lists where there are positions. Orbax
    gets one leaf at a time. It holds an encoded copy of it too, and a cache of 100 MB.

    **Arguments:**

    - `source`: as [`eqx_ckpt.interop.to_safetensors`][].
    - `path`: the directory.
    - `strict`: raise, instead of warning once, if something is lost: shardings, weak
        types, metadata and the settings of data loaders are left out, and NumPy scalars
        become arrays.
    - `overwrite`: replace what Orbax has saved there, in one step, and nothing else;
        needs Linux.

    **Returns:**

    The directory.

    **Raises:**

    - `ImportError`: Orbax is not installed.
    - [`eqx_ckpt.CorruptCheckpointError`][]: a leaf is damaged; nothing is written.
    - [`eqx_ckpt.CheckpointError`][]: Orbax cannot hold a leaf, or would write two to
        one array, such as `"a.b"` and the `"b"` in `"a"`; nothing is written.
    - [`eqx_ckpt.CheckpointExistsError`][]: something already exists at `path`.
    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp
        import orbax.checkpoint as ocp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"layers": [{"w": jnp.ones(3)}]})
        place = eqx_ckpt.interop.to_orbax("ckpt", "orbax")
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore(place)
        assert tree["layers"][0]["w"].shape == (3,)
        ```
    """
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError:
        raise ImportError(
            "`to_orbax` needs Orbax: `pip install 'eqx-ckpt[orbax]'`."
        ) from None
    place = Path(local_path(path))
    found = opened(source)
    if not found.manifest.leaves:
        raise CheckpointError(
            f"Nothing was written: {found} has no leaves, and Orbax cannot save an "
            "empty tree."
        )
    is_replacement(str(place), _KIND, overwrite=overwrite)
    check_leaves(
        found.manifest,
        Form("a checkpoint of Orbax", "", INT64),
        _problems(found.manifest),
        _losses,
        strict=strict,
    )
    tree = _as_lists(
        nested(found.manifest, "", lambda name, r: _leaf(found, name, r)),
        _positions(found.manifest),
    )
    with _beside(place, overwrite=overwrite) as new, _registry(tree) as registry:
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        saver = contextlib.closing(ocp.Checkpointer(handler))
        with saver as checkpointer, _errors_of_the_disk(place):
            checkpointer.save(new, args=ocp.args.PyTreeSave(tree))
            _check_written(new, place)
    return place


def _check_written(new: Path, place: Path) -> None:
    """Open what Orbax wrote: it leaves out arrays whose folder it cannot list."""
    try:
        open_orbax(new)
    except CorruptCheckpointError as e:
        raise CheckpointError(
            f"Nothing was written to {str(place)!r}: Orbax reported no error, but what "
            f"it wrote is not complete ({e}). Look for errors of the disk, and write "
            "it again."
        ) from None


@contextlib.contextmanager
def _errors_of_the_disk(place: Path) -> Generator[None, None, None]:
    """Let Orbax's errors be those of the system, and say where, and what to do."""
    try:
        with writing_to(str(place), "write it again"):
            yield
    except ValueError as e:
        if not os_error_of(e):
            raise
        with writing_to(str(place), "write it again"):
            raise translated(e, str(place)) from e


def _differs(path: str) -> str:
    """Why a directory is not what Orbax writes for one PyTree, or `""`."""
    files = list_files(path)
    others = [file for file in files if not _OF_ORBAX.fullmatch(file)]
    if others:
        return f"It holds {others[0]!r}."
    return "" if "_METADATA" in files else "It has no `_METADATA`."


_KIND = Kind("a checkpoint of Orbax", _differs, is_folder=True)


@contextlib.contextmanager
def _beside(place: Path, *, overwrite: bool) -> Generator[Path, None, None]:
    """A path to write to, which becomes `place` if nothing fails.

    It leads through a directory that is open, as somebody else may put a link at that.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        # Opened before the first write: it reports the errors of writes since then.
        parent = open_folder(str(place.parent))
        stack.callback(os.close, parent)
        hidden = f"{stack.enter_context(locked_attempt(str(place)))}.tmp"
        folder = make_folder(hidden)
        stack.callback(os.close, folder)
        stack.callback(delete, hidden)
        yield Path(path_through(folder) or hidden, _NEW)
        flush(parent, hidden)
        replaced = _move(folder, place, overwrite=overwrite)
        try:
            os.fsync(parent)
        except OSError:
            if replaced:
                exchange(_NEW, str(place), folder)
            raise


# The name in the hidden directory.
_NEW = "new"


def _move(folder: int, place: Path, *, overwrite: bool) -> bool:
    """Move what is new to `place`, or exchange it with what it replaces: is that so?"""
    if is_replacement(str(place), _KIND, overwrite=overwrite):
        exchange(_NEW, str(place), folder)
        return True
    try:
        # Fails unless `place` is missing or an empty directory.
        os.rename(_NEW, place, src_dir_fd=folder)
    except OSError as e:
        if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise already_there(repr(str(place))) from None
        raise
    return False


class _Later:
    """An array that is read when Orbax writes it, as NumPy's."""

    def __init__(self, source: Source, name: str) -> None:
        self._source = source
        self._name = name
        self.shape = source.manifest.leaves[name].shape
        self.dtype = plain_dtype(source.manifest.leaves[name])

    def load(self) -> Any:
        ((_, _, value),) = in_order(self._source, [self._name])
        return np.asarray(value)


class _LaterOnDevice(_Later):
    """The same, as JAX's; or PRNG keys."""

    def load(self) -> jax.Array:
        array = jax.device_put(super().load())
        impl = self._source.manifest.leaves[self._name].impl
        return array if impl is None else jax.random.wrap_key_data(array, impl=impl)


def _leaf(source: Source, name: str, record: LeafRecord) -> Any:
    if record.kind in SCALAR_KINDS:
        return scalar_from_text(record.kind, record.value or "")
    # JAX would narrow an array of 64 bits.
    is_wide = jax.dtypes.canonicalize_dtype(plain_dtype(record)) != plain_dtype(record)
    is_jax = record.kind in ("jax", "key") and not is_wide
    return (_LaterOnDevice if is_jax else _Later)(source, name)


class _Metadata:
    """Orbax's description of all arrays, written once, after the last of them."""

    def __init__(self, store: Any, count: int) -> None:
        self._store = store
        self._count = count
        self._found: list[Any] = []

    async def write(
        self, checkpoint_dir: Any, array_metadatas: Sequence[Any], process_index: int
    ) -> None:
        self._found += array_metadatas
        if len(self._found) == self._count:
            await self._store.write(
                checkpoint_dir=checkpoint_dir,
                array_metadatas=self._found,
                process_index=process_index,
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@contextlib.contextmanager
def _registry(tree: Any) -> Generator[Any, None, None]:
    """How Orbax writes each type; at the end, no write is left."""
    from orbax.checkpoint import type_handlers

    one_at_a_time = asyncio.Lock()
    writes: list[Any] = []
    has_failed = False

    async def write(serialize: Any, value: Any, info: Any, arg: Any) -> None:
        nonlocal has_failed
        async with one_at_a_time:
            if has_failed:  # Orbax would leave this write to itself.
                return
            has_failed = True
            loaded = value.load() if isinstance(value, _Later) else value
            writes[:] = await serialize([loaded], [info], [arg])
            for future in writes:
                await asyncio.to_thread(future.result)
            has_failed = False

    def in_turn(handler: Any) -> Any:
        class InTurn(handler):
            async def serialize(
                self, values: Sequence[Any], infos: Any, args: Any = None
            ) -> list[Any]:
                for one in zip(values, infos, args, strict=True):
                    await write(super().serialize, *one)
                return []

        return InTurn

    handler: Any = type_handlers.get_type_handler(jax.Array)
    store = getattr(handler, "_array_metadata_store", None)
    count = sum(isinstance(leaf, _LaterOnDevice) for leaf in jax.tree.leaves(tree))
    options: dict[str, Any] = {
        "array_metadata_store": store and _Metadata(store, count)
    }
    scalars = in_turn(type_handlers.ScalarHandler)()
    registry = type_handlers.create_type_handler_registry(
        (_LaterOnDevice, in_turn(type_handlers.ArrayHandler)(**options)),
        (_Later, in_turn(type_handlers.NumpyHandler)()),
        (int, scalars),
        (float, scalars),
        # Orbax takes the place of its description from here.
        (jax.Array, type_handlers.ArrayHandler(**options)),
    )
    try:
        yield registry
    finally:
        for future in writes:
            with contextlib.suppress(Exception):
                future.result()


def _problems(manifest: Manifest) -> Callable[[str, LeafRecord], str | None]:
    """The function that says why Orbax cannot hold a leaf beside the others."""
    names = {_key(record): name for name, record in manifest.leaves.items()}

    def problem(name: str, record: LeafRecord) -> str | None:
        key = _key(record)
        if names[key] != name:
            return f"the key {key!r}, which {names[key]!r} has too"
        return _problem(record)

    return problem


def _key(record: LeafRecord) -> str:
    """Where Orbax puts an array."""
    return ".".join(key_texts(record))


def _problem(record: LeafRecord) -> str | None:
    dtype = plain_dtype(record)
    if record.kind == "bytes":
        return "what a `filter_spec` wrote"
    if dtype.name not in STORED:
        return f"the dtype `{dtype}`"
    if 0 in record.data_shape:
        return "an array without elements"
    if record.kind == "complex":
        return "a Python complex number"
    return None


def _losses(record: LeafRecord) -> list[str]:
    found = losses(record, keeps_numbers=True, keeps_numpy=True)
    if record.kind == "key":
        found.remove(f"that it is a PRNG key of {record.impl!r}")
    if record.kind == "numpy_scalar":
        found.append("that it is a NumPy scalar")
    return found


def _positions(manifest: Manifest) -> set[_Keys]:
    """The keys that lead to each element of a sequence."""
    return {
        tuple(key for _, key in record.path[: i + 1])
        for record in manifest.leaves.values()
        for i, (kind, _) in enumerate(record.path)
        if kind == "index"
    }


def _as_lists(node: Any, positions: Container[_Keys], above: _Keys = ()) -> Any:
    """A tree with lists instead of dictionaries of positions."""
    if not isinstance(node, dict):
        return node
    children = {
        key: _as_lists(child, positions, (*above, key)) for key, child in node.items()
    }
    count = len(children)
    if count and all(i in children and (*above, i) in positions for i in range(count)):
        return [children[i] for i in range(count)]
    return sortable(children)
