"""Durable saves on a disk of a given speed, beside one file of the same bytes.

```bash
python -m benchmarks.slow_disk --width 720
```

Workload B, a training state. The disk is a file in memory with ext4 in it, behind a
loop device that Linux throttles: this needs root, and `blkio` of cgroups v1. The ways
take turns, and the disk is idle before each; seconds are the least of all rounds.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

import eqx_ckpt

from .workloads import filled, nbytes, state_of_width


_LIMIT = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_disk", description=__doc__
    )
    parser.add_argument("--width", type=int, default=720)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.2, 0.5, 3])
    args = parser.parse_args()
    tree = filled(state_of_width(args.width))
    size = nbytes(tree)
    arrays = [np.asarray(x) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    ways: dict[str, Callable[[Path], object]] = {
        "eqx_ckpt": lambda path: eqx_ckpt.tree_serialise_leaves(path, tree),
        "one file": lambda path: one_file(path, arrays),
        "safetensors": lambda path: safetensors(path, arrays),
    }
    print(f"B of width {args.width}: {size / 2**30:.2f} GiB.\n")
    print("| GiB/s of the disk | its time, s |", *(f"{way} |" for way in ways))
    print("|---|---|" + "---|" * len(ways))
    with disk(4 * size) as (folder, device):
        for rate in args.rates:
            throttle(device, int(rate * 2**30))
            found = compare(ways, folder / "saved", args.rounds)
            seconds = " | ".join(f"{found[way]:.2f}" for way in ways)
            print(f"| {rate:g} | {size / 2**30 / rate:.2f} | {seconds} |", flush=True)


def compare(
    ways: dict[str, Callable[[Path], object]], path: Path, rounds: int
) -> dict[str, float]:
    """The least seconds of each way."""
    found: dict[str, float] = {}
    for _ in range(rounds):
        for way, save in ways.items():
            start = time.perf_counter()
            save(path)
            seconds = time.perf_counter() - start
            found[way] = min(seconds, found.get(way, seconds))
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
    return found


def one_file(path: Path, arrays: list[np.ndarray]) -> None:
    with path.open("wb", buffering=0) as f:
        for array in arrays:
            left = array.reshape(-1).view(np.uint8).data
            while left:
                left = left[f.write(left) :]
        os.fsync(f.fileno())


def safetensors(path: Path, arrays: list[np.ndarray]) -> None:
    save_file({str(i): array for i, array in enumerate(arrays)}, path)
    with path.open("rb") as f:
        os.fsync(f.fileno())


@contextlib.contextmanager
def disk(size: int) -> Generator[tuple[Path, Path]]:
    """The folder of an empty file system in memory, and its device."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as above,
        contextlib.ExitStack() as undo,
    ):
        image, folder = Path(above, "image"), Path(above, "disk")
        image.touch()
        os.truncate(image, size // 2**20 * 2**20)
        device = Path(_run("losetup", "--find", "--show", image))
        undo.callback(_run, "losetup", "--detach", device)
        _run("mkfs.ext4", "-q", device)
        folder.mkdir()
        _run("mount", device, folder)
        undo.callback(_run, "umount", folder)
        undo.callback(throttle, device, 0)
        yield folder, device


def throttle(device: Path, bytes_per_second: int) -> None:
    """Bound what all processes write to a device; 0 removes the bound."""
    number = device.stat().st_rdev
    place = f"{os.major(number)}:{os.minor(number)}"
    _LIMIT.write_text(f"{place} {bytes_per_second}")


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
