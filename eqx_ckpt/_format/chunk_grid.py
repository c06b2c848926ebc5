"""How an array is split into chunks, and which chunks a region touches."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar


# The fastest size: a chunk is encoded and verified in a buffer of its own size. See
# docs/performance.md.
TARGET_BYTES = 8 * 2**20


_PART_BYTES = 2**20


_T = TypeVar("_T")


# One slice for each axis, with a start and a stop, without a step.
Region: TypeAlias = tuple[slice, ...]


Start: TypeAlias = tuple[int, ...]


def whole(shape: Sequence[int]) -> Region:
    """The region of a whole array."""
    return tuple(slice(0, size) for size in shape)


def start_of(region: Region) -> Start:
    return tuple(span.start for span in region)


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple([span.stop - span.start for span in region])


def distinct_regions(
    indices: Mapping[_T, Sequence[slice] | None], shape: Sequence[int]
) -> list[tuple[Region, list[_T]]]:
    """Each distinct region with its devices, from JAX's map of devices to indices."""
    regions: dict[str, tuple[Region, list[_T]]] = {}
    for device, index in indices.items():
        region = region_of(index or (), shape)
        # Slices cannot be keys before Python 3.12.
        regions.setdefault(repr(region), (region, []))[1].append(device)
    return list(regions.values())


def region_of(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """The region of a JAX index, such as `(slice(None), slice(0, 2))`."""
    return tuple(
        slice(*i.indices(size)[:2]) for i, size in zip(index, shape, strict=True)
    )


def chunk_shape(
    shape: Sequence[int], shard_shape: Sequence[int], itemsize: int
) -> tuple[int, ...]:
    """The chunk shape of an array whose shards have the shape `shard_shape`.

    First, the sharded axes of a shard are split, into at most four parts of 1 MiB or
    more, so that a mesh with two or four times as many shards reads no chunk twice.
    Then the other axes are split until a chunk has at most about `TARGET_BYTES`. No
    chunk crosses the edge of a shard.
    """
    if 0 in shard_shape:
        return (1,) * len(shard_shape)
    sharded = [axis for axis, size in enumerate(shard_shape) if size != shape[axis]]
    others = [axis for axis in range(len(shape)) if axis not in sharded]
    nbytes = math.prod(shard_shape) * itemsize
    parts = max(n for n in (1, 2, 4) if n == 1 or nbytes >= n * _PART_BYTES)
    chunk = list(shard_shape)
    for i, axis in enumerate(sharded):
        left = math.prod(chunk) * itemsize * parts / nbytes
        most = int(chunk[axis] / left ** (1 / (len(sharded) - i)))
        chunk[axis] = _split(chunk[axis], max(1, most), divide=True)
    for axis in (*others, *sharded):
        rest = math.prod(chunk) // chunk[axis] * itemsize
        if chunk[axis] * rest <= TARGET_BYTES:
            break
        most = max(1, TARGET_BYTES // rest)
        chunk[axis] = _split(chunk[axis], most, divide=bool(sharded))
    return tuple(chunk)


def _split(size: int, most: int, *, divide: bool) -> int:
    """The length of the pieces when `size` is split into pieces of at most `most`."""
    even = math.ceil(size / math.ceil(size / most))
    if not divide:
        return even
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    best = max(d for d in (*small, *(size // d for d in small)) if d <= most)
    # A prime number of rows would be split into single rows: thousands of tiny files.
    return best if best * 8 >= even else size


def grid_shape(shape: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """The number of chunks along each axis."""
    return tuple([-(-n // c) for n, c in zip(shape, chunk, strict=True)])


def chunk_count(shape: Sequence[int], chunk: Sequence[int]) -> int:
    return math.prod(grid_shape(shape, chunk))


def chunk_keys(shape: Sequence[int], chunk: Sequence[int]) -> list[str]:
    """The keys of all chunks of an array, in C order: `c.0.0`, `c.0.1`, ..."""
    if 0 in shape:
        return []
    axes = [map(str, range(-(-n // c))) for n, c in zip(shape, chunk, strict=True)]
    return [".".join(("c", *index)) for index in itertools.product(*axes)]


def touched(region: Region, shape: Sequence[int], chunk: Sequence[int]) -> list[int]:
    """The positions, in C order, of the chunks that a region touches."""
    positions = [0]
    for span, size, c in zip(region, shape, chunk, strict=True):
        axis = range(span.start // c, -(-span.stop // c))
        count = -(-size // c)
        positions = [p * count + i for p in positions for i in axis]
    return positions


def chunk_index(
    position: int, shape: Sequence[int], chunk: Sequence[int]
) -> tuple[int, ...]:
    """The index along each axis of the chunk at a position in C order."""
    index: list[int] = []
    for count in reversed(grid_shape(shape, chunk)):
        position, i = divmod(position, count)
        index.append(i)
    return tuple(reversed(index))


def chunk_region(
    index: Sequence[int], shape: Sequence[int], chunk: Sequence[int]
) -> Region:
    """The part of a chunk that is inside the array."""
    return tuple(
        slice(i * c, min((i + 1) * c, size))
        for i, size, c in zip(index, shape, chunk, strict=True)
    )


def chunk_key(index: Sequence[int]) -> str:
    return ".".join(("c", *map(str, index)))


def overlap(a: Region, b: Region) -> Region:
    """The intersection of two regions that overlap."""
    return tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop))
        for x, y in zip(a, b, strict=True)
    )


def relative(region: Region, base: Region) -> Region:
    """A region inside another one, relative to the start of that one."""
    return tuple(
        slice(x.start - b.start, x.stop - b.start)
        for x, b in zip(region, base, strict=True)
    )


def run_start(region: Region, shape: Sequence[int]) -> int | None:
    """The offset of a region in an array in C order; `None` if it is not contiguous."""
    start, is_wide = 0, False
    for span, size in zip(region, shape, strict=True):
        length = span.stop - span.start
        if is_wide and length != size:
            return None
        is_wide = is_wide or length > 1
        start = start * size + span.start
    return start


def blocks(region: Region, chunk: Sequence[int], itemsize: int) -> Iterator[Region]:
    """Split a region along the chunk grid into pieces of about `TARGET_BYTES`.

    The first axis that has more than one chunk is split, then the next ones, until the
    pieces are small enough; a piece is never smaller than a chunk.
    """
    sizes = [span.stop - span.start for span in region]
    for axis, (span, c) in enumerate(zip(region, chunk, strict=True)):
        if math.prod(sizes) * itemsize <= TARGET_BYTES:
            break
        if sizes[axis] <= c:
            continue
        rest = math.prod(sizes) // sizes[axis] * itemsize
        step = max(1, TARGET_BYTES // (rest * c)) * c
        start = span.start
        while start < span.stop:
            stop = min((start // c) * c + step, span.stop)
            piece = (*region[:axis], slice(start, stop), *region[axis + 1 :])
            yield from blocks(piece, chunk, itemsize) if step == c else (piece,)
            start = stop
        return
    yield region


def batches(
    items: Iterable[_T], nbytes: Callable[[_T], int], limit: int
) -> Iterator[list[_T]]:
    """Group items into lists of at most `limit` bytes, or of one item.

    A full list is yielded before the next item is requested.
    """
    batch: list[_T] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if batch and total + size > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
        if total >= limit:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
