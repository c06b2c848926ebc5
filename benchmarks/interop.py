"""Files of safetensors: restored by this package, and by the library of the format.

```bash
python -m benchmarks.interop --gib 4
```

Each way in a process of its own, in turns; the file is in the page cache. The ways out
are measured by the memory that they add to their process at most.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import eqx_ckpt

from .memory import warm_memory


WIDTH, LEAVES_PER_LAYER = 4096, 2
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interop", description=__doc__
    )
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--way", choices=[*WAYS, *OUT])
    parser.add_argument("--path", type=Path)
    args = parser.parse_args()
    if args.way in WAYS:
        print(json.dumps(timed(WAYS[args.way], args.path)))
    elif args.way:
        print(json.dumps(memory_of(OUT[args.way], args.path)))
    else:
        compare(args.gib)


def compare(gib: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        make(path, max(1, int(gib * 2**30 / (LEAVES_PER_LAYER * WIDTH * WIDTH * 2))))
        found: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(ROUNDS):
            for way in WAYS:
                found[way].append(in_process(way, path))
        print("| | seconds: least | median |\n|---|---|---|")
        for way, times in found.items():
            print(f"| {way} | {min(times):.3f} | {statistics.median(times):.3f} |")
        print("\n| way out | MiB of memory |\n|---|---|")
        for way in OUT:
            print(f"| {way} | {in_process(way, path) / 2**20:.0f} |")


def make(path: Path, layers: int) -> None:
    """Layers of two bfloat16 matrices, as the library writes them."""
    from safetensors.numpy import save_file

    row = np.random.default_rng(0).normal(size=WIDTH).astype(jax.numpy.bfloat16)
    matrix = np.tile(row, (WIDTH, 1))
    save_file(
        {f"layers.{i}.{part}": matrix for i in range(layers) for part in "ab"}, path
    )


def in_process(way: str, path: Path) -> float:
    command = [sys.executable, "-m", "benchmarks.interop", "--way", way]
    out = subprocess.run(
        [*command, "--path", str(path)], check=True, capture_output=True, text=True
    )
    return json.loads(out.stdout)


def timed(way: Callable[[Path], Any], path: Path) -> float:
    jax.block_until_ready(jax.device_put(np.zeros(3)))  # It starts the backend.
    warm_memory(2 * path.stat().st_size)
    start = time.perf_counter()
    jax.block_until_ready(way(path))
    return time.perf_counter() - start


def memory_of(way: Callable[[Path], Any], path: Path) -> float:
    """Bytes of memory that a way out adds, beyond that of a small one before it."""
    small = path.with_name(f"small.{path.name}")
    if not small.exists():
        make_small(small)
    way(small)
    before = peak()
    way(path)
    return peak() - before


def make_small(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(3, np.float32)}, path)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10


def ours(path: Path) -> Any:
    source = eqx_ckpt.interop.open_safetensors(path)
    return eqx_ckpt.tree_deserialise_leaves(source, eqx_ckpt.tree_like(source))


def our_layer(path: Path) -> Any:
    source = eqx_ckpt.interop.open_safetensors(path)
    like = eqx_ckpt.tree_like(source, prefix="layers/0")
    return eqx_ckpt.tree_deserialise_leaves(source, like, prefix="layers/0")


def library(path: Path) -> Any:
    from safetensors.numpy import load_file

    return jax.device_put(load_file(path))


def library_layer(path: Path) -> Any:
    from safetensors import safe_open

    with safe_open(path, "numpy") as f:
        return jax.device_put([f.get_tensor(f"layers.0.{part}") for part in "ab"])


def out_of(way: Callable[..., Any], name: str) -> Callable[[Path], Any]:
    def run(path: Path) -> Any:
        source = eqx_ckpt.interop.open_safetensors(path)
        return way(source, path.with_name(f"{path.name}.{name}"), overwrite=True)

    return run


WAYS: dict[str, Callable[[Path], Any]] = {
    "all: eqx_ckpt": ours,
    "all: safetensors and device_put": library,
    "a layer: eqx_ckpt": our_layer,
    "a layer: safetensors and device_put": library_layer,
}
OUT: dict[str, Callable[[Path], Any]] = {
    "to_safetensors": out_of(eqx_ckpt.interop.to_safetensors, "safetensors"),
    "to_flax": out_of(eqx_ckpt.interop.to_flax, "msgpack"),
    "copy": out_of(eqx_ckpt.copy, "ckpt"),
}


if __name__ == "__main__":
    main()
