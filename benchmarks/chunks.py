"""`python -m benchmarks.chunks`: how large chunks are to be, and which axes are cut.

Arrays that are sharded over four devices are restored onto 2x and 4x of them, onto half
and along the other axis. The first table says what a process of the new mesh would read
if it had one device: the bytes of all chunks that it touches, for each byte that it
needs. The second one has seconds, as ratios to 8 MiB cut as the package does it: of a
restore by one process, and of the reads of the first processes of the new mesh,
"played" one after the other. A repetition takes ten minutes.
"""

import argparse
import functools as ft
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt._format import chunk_grid as chunks, leaf_record
from eqx_ckpt._format.source import read_regions, RegionRead
from eqx_ckpt._restoring.placement import pieces
from eqx_ckpt._sources.checkpoint_source import Checkpoint

from .table import markdown
from .workloads import check_same, filled


MIB = 2**20

# How many parts each axis has.
Grid = tuple[int, int]
Shape = tuple[int, ...]

# A matrix of a multilayer perceptron, an embedding, and small matrices of attention.
_SHAPES = {
    "wide": ((8192, 14336), jnp.bfloat16),
    "tokens": ((50304, 1024), jnp.float32),
    **{f"square{i}": ((2048, 2048), jnp.float32) for i in range(8)},
}
_SAVED: dict[str, Grid] = {"rows": (4, 1), "columns": (1, 4), "blocks": (2, 2)}
_RESTORED: dict[str, dict[str, Grid]] = {
    "rows": {"2x": (8, 1), "4x": (16, 1), "half": (2, 1), "other": (1, 4)},
    "columns": {"2x": (1, 8), "4x": (1, 16), "half": (1, 2), "other": (4, 1)},
    "blocks": {"2x": (2, 4), "4x": (4, 4), "half": (2, 1), "other": (1, 4)},
}
_TARGETS = [1, 2, 4, 8, 16, 32, 64]
_DEVICES = 16
# So many processes of a new mesh are played, one after the other.
_PLAYED = 4


def _set_target(nbytes: int) -> None:
    """Set the size of chunks, which is no option of the package."""
    chunks.TARGET_BYTES = nbytes


def _as_it_is(shape: Shape, shard: Shape, itemsize: int, target: int) -> Shape:
    """What the package does."""
    _set_target(target)
    return chunks.chunk_shape(shape, shard, itemsize)


def _by_rows(shape: Shape, shard: Shape, itemsize: int, target: int) -> Shape:
    """Cut the first axis, and the next one only if its rows are too large."""
    chunk = list(shard)
    for axis, size in enumerate(shard):
        rest = math.prod(chunk[axis + 1 :]) * itemsize
        if size * rest > target:
            most = max(1, target // rest)
            chunk[axis] = chunks._split(size, most, divide=shard != shape)
    return tuple(chunk)


_CUTS: dict[str, Callable[[Shape, Shape, int, int], Shape]] = {
    "rows": _by_rows,
    "as it is": _as_it_is,
}


class Case(NamedTuple):
    """How the arrays are cut, and how they are sharded when they are saved."""

    cut: str
    mib: float
    saved: str


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    cases = [
        Case(cut, mib, saved)
        for saved in args.saved
        for cut in args.cuts
        for mib in args.targets
    ]
    results: list[dict[str, Any]] = []
    scratch = Path(tempfile.mkdtemp(prefix="chunks-", dir=args.dir))
    try:
        for result in _measurements(cases, args.repeats, scratch):
            results.append(result)
            print(result, file=sys.stderr, flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
    finally:
        shutil.rmtree(scratch)
    print(_bytes_table(args.saved, args.cuts, args.targets))
    if results:
        print(_seconds_table(cases, results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chunks", description=__doc__
    )
    parser.add_argument("--targets", type=float, nargs="+", default=_TARGETS)
    parser.add_argument("--cuts", nargs="+", choices=_CUTS, default=list(_CUTS))
    parser.add_argument("--saved", nargs="+", choices=_SAVED, default=list(_SAVED))
    parser.add_argument("--repeats", type=int, default=1, help="0: only the bytes")
    parser.add_argument("--dir", type=Path, help="where to save; the default is TMPDIR")
    parser.add_argument("--json", type=Path, help="write all that was measured there")
    return parser


def _measurements(
    cases: Sequence[Case], repeats: int, scratch: Path
) -> Iterator[dict[str, Any]]:
    """Every case in turn, again and again, each in a fresh process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={_DEVICES}"
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as processes:
        for repeat in range(repeats):
            for case in cases if repeat % 2 == 0 else reversed(cases):
                path = scratch / "checkpoint"
                yield processes.submit(_measure, case, path).result()
                shutil.rmtree(path)


def _measure(case: Case, path: Path) -> dict[str, Any]:
    """A save, and a restore onto each mesh, twice; seconds."""
    _cut_by(_CUTS[case.cut], int(case.mib * MIB))
    tree = filled(_structs(_SAVED[case.saved]))
    os.sync()
    result: dict[str, Any] = case._asdict()
    result["save"] = _seconds(lambda: eqx_ckpt.tree_serialise_leaves(path, tree))
    result["files"] = sum(file.is_file() for file in path.rglob("c.*"))
    assert result["files"] == _count(*case), "the chunks have another shape"
    grids = {**_RESTORED[case.saved], "one": (1, 1)}
    for _ in range(2):
        for name, grid in grids.items():
            like = _structs(grid)
            restore = ft.partial(eqx_ckpt.tree_deserialise_leaves, path, like)
            result.setdefault(name, []).append(_seconds(restore))
            if name != "one":
                played = _seconds(lambda like=like: _play(path, like))
                result.setdefault(f"{name}, played", []).append(played)
    check_same(restore(), tree)
    return result


def _cut_by(cut: Callable[[Shape, Shape, int, int], Shape], target: int) -> None:
    """Let this process save chunks of another shape."""
    _set_target(target)
    leaf_record.chunk_shape = lambda shape, shard, itemsize: cut(
        shape, shard, itemsize, target
    )


def _structs(grid: Grid) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = jax.make_mesh(
        grid,
        ("x", "y"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: math.prod(grid)],
    )
    sharding = NamedSharding(mesh, P("x", "y"))
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, (shape, dtype) in _SHAPES.items()
    }


def _play(path: Path, like: dict[str, jax.ShapeDtypeStruct]) -> None:
    """Read what the first processes would, so that none has what another one read."""

    source = Checkpoint(path)
    sharding = like["wide"].sharding
    devices = sorted(sharding.device_set, key=lambda device: device.id)
    for device in devices[:_PLAYED]:
        reads = [
            RegionRead(name, source.manifest.leaves[name], region)
            for name, struct in like.items()
            for region, where in pieces(sharding, struct.shape)
            if device in where
        ]
        read_regions(source, reads)


def _seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def _bytes_table(
    saved: Sequence[str], cuts: Sequence[str], targets: Sequence[float]
) -> str:
    """What is read for each byte that is needed, and the number of chunks.

    With `sharding_indexed` and the same inner chunks, as much is read, because these
    are read whole; but a shard is one file, of which the last row has the number.
    """
    rows: list[Sequence[str]] = []
    for name in saved:
        grids = _RESTORED[name]
        for cut in cuts:
            for mib in targets:
                read = [f"{_read(cut, mib, name, grid):.2f}" for grid in grids.values()]
                files = _count(cut, mib, name)
                rows.append((name, cut, f"{mib:g}", *read, str(files)))
        in_shards = str(math.prod(_SAVED[name]) * len(_SHAPES))
        rows.append((name, "", "shards", *("" for _ in grids), in_shards))
    header = ("saved", "cut", "MiB", *_RESTORED["rows"], "files")
    return markdown(header, rows)


def _chunk(cut: str, mib: float, saved: str, name: str) -> Shape:
    shape, dtype = _SHAPES[name]
    shard = _part(shape, _SAVED[saved])
    return _CUTS[cut](shape, shard, np.dtype(dtype).itemsize, int(mib * MIB))


def _count(cut: str, mib: float, saved: str) -> int:
    """The number of chunks."""
    return sum(
        math.prod(chunks.grid_shape(shape, _chunk(cut, mib, saved, name)))
        for name, (shape, _) in _SHAPES.items()
    )


def _read(cut: str, mib: float, saved: str, grid: Grid) -> float:
    """Of the process that reads most, the bytes that it reads for each it needs."""
    found: list[float] = []
    for i, j in np.ndindex(grid):
        read = needed = 0
        for name, (shape, dtype) in _SHAPES.items():
            chunk, itemsize = _chunk(cut, mib, saved, name), np.dtype(dtype).itemsize
            rows, columns = _part(shape, grid)
            region = (
                slice(i * rows, (i + 1) * rows),
                slice(j * columns, (j + 1) * columns),
            )
            hit = chunks.touched(region, shape, chunk)
            read += len(hit) * math.prod(chunk) * itemsize
            needed += rows * columns * itemsize
        found.append(read / needed)
    return max(found)


def _part(shape: Shape, grid: Grid) -> Shape:
    return tuple(n // parts for n, parts in zip(shape, grid, strict=True))


def _seconds_table(cases: Sequence[Case], results: Sequence[dict[str, Any]]) -> str:
    """The fastest of each case, as ratio to the one of 8 MiB; and its seconds."""
    keys = [key for key in results[0] if key not in (*Case._fields, "files")]

    def fastest(case: Case, key: str) -> float:
        of_it = [r for r in results if case == tuple(r[f] for f in Case._fields)]
        if key == "save":
            return statistics.median(r[key] for r in of_it)
        return min(min(r[key]) for r in of_it)

    rows: list[Sequence[str]] = []
    for case in cases:
        usual = Case(cases[0].cut, 8, case.saved)
        usual = usual if usual in cases else case
        cells = [f"{fastest(case, k) / fastest(usual, k):.2f}" for k in keys]
        if case == usual:
            cells = [f"{fastest(case, k):.3g} s" for k in keys]
        rows.append((case.saved, case.cut, f"{case.mib:g}", *cells))
    return markdown(("saved", "cut", "MiB", *keys), rows)


if __name__ == "__main__":
    sys.exit(main())
