"""Restores and checks of what is not in the page cache, beside bare reads of its files.

```bash
python -m benchmarks.cold --width 720
```

Workload B, a training state. The ways take turns in one process, after its files were
dropped from the cache; seconds are the least of all rounds. Bare reads compute no
checksum: "direct" past the cache with eight threads, "buffered" through it with two.
Another file of as many bytes stays in the cache meanwhile, or not: `mincore` tells.
"""

import argparse
import ctypes
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import equinox as eqx
import jax

import eqx_ckpt

from .workloads import filled, nbytes, state_of_width


_PIECE = 2**21
_BLOCK = 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cold", description=__doc__
    )
    parser.add_argument("--width", type=int, default=720)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    like = state_of_width(args.width)
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        path, other = Path(folder, "saved"), Path(folder, "other")
        tree = filled(like)
        eqx_ckpt.tree_serialise_leaves(path, tree)
        size = nbytes(tree)
        del tree
        with other.open("wb") as f:
            for _ in range(size // _PIECE):
                f.write(os.urandom(_PIECE))
        found = compare(ways(path, like), path, other, args.rounds)
    print(f"B of width {args.width}: {size / 2**30:.2f} GiB.\n")
    print("| | s/GiB | CPU s/GiB | cached of the other file |")
    print("|---|---|---|---|")
    for way, (seconds, cpu, left) in found.items():
        per_gib = 2**30 / size
        print(f"| {way} | {seconds * per_gib:.2f} | {cpu * per_gib:.2f} | {left:.2f} |")


def ways(path: Path, like: eqx.Module) -> dict[str, Callable[[], object]]:
    return {
        "restore": lambda: jax.block_until_ready(
            eqx.filter(eqx_ckpt.tree_deserialise_leaves(path, like), eqx.is_array)
        ),
        "verify": lambda: eqx_ckpt.inspect.verify(path),
        "direct reads": lambda: bare(path, os.O_DIRECT, 8),
        "buffered reads": lambda: bare(path, 0, 2),
    }


def compare(
    calls: dict[str, Callable[[], object]], path: Path, other: Path, rounds: int
) -> dict[str, tuple[float, float, float]]:
    """The least seconds, CPU seconds, and part of the other file that stayed."""
    found: dict[str, tuple[float, float, float]] = {}
    for _ in range(rounds):
        for way, call in calls.items():
            for file in files(path):
                forget(file)
            other.read_bytes()
            cpu, start = time.process_time(), time.perf_counter()
            call()
            now = time.perf_counter() - start, time.process_time() - cpu, held(other)
            a, b, c = map(min, found.get(way, now), now)
            found[way] = a, b, c
    return found


def files(path: Path) -> Iterator[Path]:
    return (file for file in path.rglob("*") if file.is_file())


def forget(file: Path) -> None:
    with file.open("rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def held(file: Path) -> float:
    """The part of a file that is in the page cache."""
    with file.open("rb") as f:
        pages = mmap.mmap(f.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=3)
    view = ctypes.c_char.from_buffer(pages)
    found = (ctypes.c_ubyte * -(-len(pages) // mmap.PAGESIZE))()
    ctypes.CDLL(None).mincore(ctypes.byref(view), ctypes.c_size_t(len(pages)), found)
    del view
    pages.close()
    return sum(page & 1 for page in found) / len(found)


def bare(path: Path, flags: int, threads: int) -> None:
    """Read all files into memory that nobody looks at."""
    found = [(file, file.stat().st_size) for file in files(path)]
    room = [-(-size // _BLOCK) * _BLOCK for _, size in found]
    memory = mmap.mmap(-1, sum(room), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view, start = memoryview(memory), 0
    with ThreadPoolExecutor(threads) as pool:
        for (file, _), nbytes in zip(found, room, strict=True):
            pool.submit(_read, file, view[start : start + nbytes], flags)
            start += nbytes


def _read(file: Path, memory: memoryview, flags: int) -> None:
    fd = os.open(file, os.O_RDONLY | flags)
    try:
        for start in range(0, len(memory), _PIECE):
            os.preadv(fd, [memory[start : start + _PIECE]], start)
    finally:
        os.close(fd)


if __name__ == "__main__":
    main()
