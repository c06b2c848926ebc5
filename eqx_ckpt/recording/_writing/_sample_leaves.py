"""Select the draws of a block that are recorded."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._errors import CheckpointError, LeafMismatchError
from ..._format.leaf_names import encode
from ..._format.leaf_record import (
    CannotSave,
    dtype_from_tag,
    key_shape,
    LeafRecord,
    tag_and_data_type,
)
from ..._format.manifest import check_array, COMPRESSIONS
from ..._format.sample_record import Leaf, Record
from ..._format.user_metadata import is_same
from ..._tree.leaves.key_paths import check_distinct, key_paths, typed
from ..._tree.leaves.leaf_kinds import describe_like
from ..._tree.plans.write_plan import Compression


def kept_of(
    keep: np.ndarray | None, taken: np.ndarray, draws: int, most: int | None
) -> tuple[np.ndarray | None, np.ndarray]:
    """Which draws of a block to record, and which chains have no room for all of them.

    `taken` is the number of draws that each chain has already; `most` is the limit. All
    draws are recorded if the first result is `None`; else it is `bool[chain, draw]`.
    """
    shape = (len(taken), draws)
    if keep is not None:
        keep = np.broadcast_to(keep, shape)
    if most is None:
        return keep, np.zeros(len(taken), bool)
    room = room_of(taken, most)
    full = counts_of(keep, draws) > room
    if not full.any():
        return keep, full
    keep = np.ones(shape, bool) if keep is None else keep
    return keep & (keep.cumsum(1) <= room[:, None]), full


def room_of(taken: Any, most: int) -> Any:
    """How many draws fit; a recording may have more than `most` from earlier."""
    return np.maximum(most - taken, 0)


def fitting(keep: np.ndarray | None, taken: np.ndarray, draws: int, most: int) -> int:
    """The number of draws of a block before the first one that has no room."""
    kept, full = kept_of(keep, taken, draws, most)
    if kept is None or not full.any():
        return draws
    keep = np.ones(draws, bool) if keep is None else keep
    refused = np.broadcast_to(keep, kept.shape) & ~kept
    return int(refused.any(0).argmax())


def counts_of(kept: np.ndarray | None, draws: int) -> Any:
    """The number of draws that are kept of each chain."""
    return draws if kept is None else kept.sum(1)


def checked_keep(
    keep: Any,
    one: tuple[int, ...],
    each: tuple[int, ...],
    *,
    convert: Callable[[Any], Any] = jnp.asarray,
    verb: str = "is",
) -> Any:
    """`keep` as an array of bools, for all chains in one or for each of them."""
    try:
        array = keep if isinstance(keep, jax.Array) else convert(keep)
        found = f"{array.dtype}{list(array.shape)}"
    except (TypeError, ValueError):
        array, found = None, f"a `{type(keep).__name__}`"
    if array is not None and array.dtype == np.bool_ and array.shape in (one, each):
        return array
    raise ValueError(
        f"`keep` {verb} {'None' if keep is None else found}. It must be bool{list(one)}"
        + (f", or bool{list(each)} to tell chains apart." if one != each else ".")
    )


def on_host(keep: Any) -> np.ndarray | None:
    """Copy `keep` to the host; rows of other processes' chains stay `False`, unused."""
    if keep is None:
        return None
    if not isinstance(keep, jax.Array) or keep.is_fully_addressable:
        return np.asarray(keep)
    host = np.zeros(keep.shape, keep.dtype)
    for part in keep.addressable_shards:
        host[part.index] = np.asarray(part.data)
    return host


# Of the last chunks of all chains and leaves. Each commit rewrites them, and each takes
# as much of the disk as a full one. Those of a small leaf are not much smaller.
_CHUNK_BYTES, _LEAST_BYTES = 2**20, 2**17


_MAX_ROWS = 2**14


# One chain can be read without the others, up to so many; then in so many bands.
_BANDS = 16


def leaves_of(
    like: PyTree,
    chains: int | None,
    compression: Compression,
    chunk_bytes: int | None,
) -> list[Leaf]:
    """The leaves of `like`, in order; raise one error that lists every problem."""
    paths = list(key_paths(like))
    named = [(path, encode(typed(path))) for path, _ in paths]
    check_distinct(named)
    found: list[Leaf] = []
    problems: list[str] = []
    for (path, example), (_, name) in zip(paths, named, strict=True):
        try:
            record = _record(example)._replace(path=typed(path))
            codec = compression
            if callable(codec):
                codec = codec(name, record)
            if codec not in (None, *COMPRESSIONS):
                raise CannotSave(f"cannot be compressed by {codec!r}; pass 'zstd'")
            record = record._replace(compression=codec)
            leaf = Leaf(name, record, 1, 1)
            check_array(leaf.array(chains, 1))
            found.append(leaf)
        except CannotSave as e:
            problems.append(f"- `{jtu.keystr(path)}` {e}.")
    if problems or not found:
        raise CheckpointError(
            "`like` must be a PyTree of arrays or `jax.ShapeDtypeStruct`s with the "
            "shapes and dtypes of one sample of one chain:\n"
            + ("\n".join(problems) or "- It has no leaves.")
        )
    total = sum(leaf.row_bytes for leaf in found)
    return [_chunked(leaf, chains or 1, chunk_bytes, total) for leaf in found]


def _chunked(leaf: Leaf, chains: int, chunk_bytes: int | None, total: int) -> Leaf:
    """Choose the chunks of a leaf: how many chains, and how many draws.

    `total` is the size of a sample, with all leaves.
    """
    row, most = max(1, leaf.row_bytes), chunk_bytes
    bands = min(chains, _BANDS)
    if most is None:
        share = _CHUNK_BYTES * leaf.row_bytes // max(1, total)
        most = max(_LEAST_BYTES, share) // bands
    rows = max(1, most * bands // (row * chains))
    if chunk_bytes is None:
        # A chunk size that the user passes applies to scalars too.
        rows = min(rows, _MAX_ROWS)
    size = max(1, min(-(-chains // bands), most // (row * rows)))
    # If bands are equal, processes with equally many chains have bands of their own.
    equal = max(n for n in range(1, size + 1) if chains % n == 0)
    return leaf._replace(chains=equal if 2 * equal > size else size, rows=rows)


def _record(example: Any) -> LeafRecord:
    """The record of a leaf of `like`, for one sample."""
    record = describe_like(example)
    if record is None or not isinstance(
        example, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic
    ):
        if record is not None and record.kind == "unknown":
            raise CannotSave(f"{record.value}")
        way_out = "pass `np.float32(0)`, or another scalar that has a dtype"
        if callable(example):
            way_out = "leave it out: `equinox.filter(like, equinox.is_array)`"
        raise CannotSave(f"is a `{type(example).__name__}`; {way_out}")
    if record.kind == "unknown":
        raise CannotSave(f"{record.value}")
    if record.kind == "key":
        inner = key_shape(record.impl or "") or ()
        return LeafRecord(
            "key",
            "key",
            record.shape,
            impl=record.impl,
            data_type="uint32",
            data_shape=(*record.shape, *inner),
        )
    kind = "numpy" if isinstance(example, np.ndarray | np.generic) else "jax"
    tag, data_type = tag_and_data_type(np.dtype(example.dtype))
    shape = tuple(example.shape)
    return LeafRecord(kind, tag, shape, data_type=data_type, data_shape=shape)


def check_on_device(leaves: Sequence[Leaf]) -> None:
    """Raise unless arrays on a device can hold exactly what the leaves hold."""
    problems = [
        f"- {leaf.name!r}: {leaf.record.dtype}."
        for leaf in leaves
        if leaf.record.kind != "key" and not _fits_a_device(leaf.record)
    ]
    if problems:
        raise CheckpointError(
            "JAX would change the dtypes of these leaves of `like` inside a compiled "
            "program:\n"
            + "\n".join(problems)
            + "\nUse dtypes that JAX has now, or `jax.config.update('jax_enable_x64', "
            "True)`; or record these samples with `extend` and `append`."
        )


def _fits_a_device(record: LeafRecord) -> bool:
    dtype = dtype_from_tag(record.dtype)
    is_number = dtype.kind in "biufcV" and dtype.isnative
    return is_number and jax.dtypes.canonicalize_dtype(dtype) == dtype


class Block(NamedTuple):
    """Samples that match the leaves of a recording, in the order of the leaves.

    **Attributes:**

    - `arrays`: one for each leaf, with the axes `(chain, draw, ...)` or `(draw, ...)`.
    - `draws`: the number of draws of each chain.
    """

    arrays: list[Any]
    draws: int


def checked_samples(
    samples: PyTree,
    leaves: Sequence[Leaf],
    chains: int | None,
    *,
    one: bool = False,
    traced: bool = False,
) -> Block:
    """The leaves of samples; raise one error for all that do not match `like`.

    `one` means a single sample, without an axis for draws. `traced` allows arrays
    without data, inside `jit`.
    """
    found = {
        encode(typed(path)): x
        for path, x in key_paths(samples)
        if not (x is None or callable(x) or isinstance(x, str))
    }
    shapes = {name: _abstract(x) for name, x in found.items()} if traced else found
    names = {encode(leaf.record.path): leaf for leaf in leaves}
    problems = [f"- {name!r}: not in the samples." for name in names.keys() - found]
    problems += [f"- {name!r}: not in `like`." for name in found.keys() - names]
    draws: dict[int, str] = {}
    axis = 0 if chains is None else 1
    for name in names.keys() & found:
        problem = _difference(shapes[name], names[name].record, chains, one, traced)
        if problem:
            problems.append(f"- {name!r}: {problem}.")
        elif not one:
            draws.setdefault(found[name].shape[axis], name)
    if len(draws) > 1:
        counts = ", ".join(f"{count} ({name!r})" for count, name in draws.items())
        problems.append(f"- The leaves have different numbers of draws: {counts}.")
    if problems:
        raise LeafMismatchError(
            "The samples do not match `like`, and none of them was recorded:\n"
            + "\n".join(sorted(problems))
        )
    arrays = [found[name] for name in names]
    return Block(arrays, 1 if one else next(iter(draws)))


def _abstract(x: Any) -> Any:
    """The shape and dtype of an array, without its data."""
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic)
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array else x


def _difference(
    x: Any, record: LeafRecord, chains: int | None, one: bool, traced: bool
) -> str:
    """Describe how a leaf of samples differs from its record; empty if it does not."""
    lead = [] if chains is None else [str(chains)]
    lead += [] if one else ["draws"]
    sizes = ", ".join([*lead, *map(str, record.shape)])
    dtype = f"PRNG key of impl {record.impl!r}" if record.impl else record.dtype
    expected = f"{dtype}[{sizes}]"
    is_array = isinstance(x, jax.Array | np.ndarray | np.generic) or (
        traced and isinstance(x, jax.ShapeDtypeStruct)
    )
    other = describe_like(x)
    if other is None or not is_array:
        return f"{expected} in the recording, a `{type(x).__name__}` in the samples"
    if other.kind == "unknown":
        return f"it {other.value}"
    if isinstance(x, jax.Array) and x.is_deleted():
        return "it was deleted: it was donated to a jitted function"
    shape, rank = other.shape, len(record.shape)
    n = len(lead)
    fits = (
        (other.dtype, other.impl) == (record.dtype, record.impl)
        and len(shape) == n + rank
        and shape[n:] == record.shape
        and (chains is None or shape[0] == chains)
    )
    return "" if fits else f"{expected} in the recording, {other} in the samples"


def rows_of(array: Any, leaf: Leaf, chains: int | None) -> Iterator[tuple[int, Any]]:
    """Copy an array of samples to the host, in parts `(chain, draw, ...)`.

    With each part comes the number of its first chain.
    """
    record = leaf.record
    if record.kind == "key":
        array = jax.random.key_data(array)
    for first, host in _parts(array, chains):
        if isinstance(array, np.ndarray | np.generic):
            # Copy: the caller may change the array before it is written.
            host = to_stored(np.array(host), record._replace(kind="numpy"))
        else:
            host = to_stored(host, record)
        yield first, host if chains is not None else host[None]


def to_stored(host: np.ndarray, record: LeafRecord) -> np.ndarray:
    """Convert a host array to the `data_type` of its Zarr array."""
    if not host.dtype.isnative:
        host = host.astype(host.dtype.newbyteorder("="))
    if record.kind == "numpy" and record.dtype == "bool":
        # TensorStore would write a byte other than 0 and 1, but refuse to read it.
        host = np.asarray(host.view(np.uint8) != 0)
    return host.view(record.data_type)


def _parts(array: Any, chains: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """Host arrays of consecutive chains, each with the number of its first chain."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        for part in array.addressable_shards:
            if part.replica_id == 0 or array.is_fully_replicated:
                first = (part.index[0].start or 0) if part.index else 0
                yield first, np.asarray(part.data)
                if array.is_fully_replicated:
                    return
        return
    is_split = isinstance(array, jax.Array) and len(array.sharding.device_set) > 1
    if not is_split or array.is_fully_replicated:
        yield 0, np.asarray(array)
        return
    shard = array.sharding.shard_shape(array.shape)
    if chains is None or shard[1:] != array.shape[1:]:
        yield 0, np.asarray(array)
        return
    seen: set[int] = set()
    for part in array.addressable_shards:
        first = part.index[0].start or 0
        if first not in seen:
            seen.add(first)
            yield first, np.asarray(part.data)


def check_same(record: Record, wanted: Record, where: str, same: Callable) -> None:
    """Raise if a recording is continued with other leaves, chains or metadata."""
    before = {leaf.name: leaf for leaf in record.leaves}
    now = {leaf.name: leaf for leaf in wanted.leaves}
    problems = [f"- {n!r}: not in `like`." for n in before.keys() - now.keys()]
    problems += [f"- {n!r}: not in the recording." for n in now.keys() - before.keys()]
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        if (old.record[1:4], old.record.path) != (new.record[1:4], new.record.path):
            problems.append(
                f"- {name!r}: {old.record} in the recording, {new.record} in `like`."
            )
        elif problem := same(old, new):
            problems.append(f"- {name!r}: {problem}.")
    if record.chains != wanted.chains:
        problems.append(
            f"- `chains`: {record.chains} in the recording, {wanted.chains} now."
        )
    given = wanted.metadata
    if given is not None and not is_same(given, record.metadata):
        problems.append("- `metadata`: differ from those in the recording.")
    if problems:
        raise CheckpointError(
            f"{where} is a recording of something else:\n"
            + "\n".join(sorted(problems))
            + "\nPass what the recording was begun with, or choose another path."
        )
