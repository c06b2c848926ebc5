"""Saves and restores of 2 GiB that are on a GPU, and the memory of the process.

```bash
XLA_PYTHON_CLIENT_PREALLOCATE=false python -m benchmarks.accelerator
```

The first one of a process takes the pinned memory that later ones have.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import eqx_ckpt

from .measure import peak_memory, reset_peak


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accelerator", description=__doc__
    )
    parser.add_argument("--arrays", type=int, default=32, help="of 64 MiB each")
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    print(jax.devices()[0].device_kind)
    print("| | blocked, s | with a step, s | until durable, s | peak, MiB |")
    print("|---|---|---|---|---|")
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        measure(folder, args.arrays)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, arrays: int) -> None:
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    draw = jax.jit(lambda key: jax.random.normal(key, (4096, 4096)))
    tree = {f"{i}": draw(jax.random.key(i)) for i in range(arrays)}
    like = {name: jax.ShapeDtypeStruct((4096, 4096), jnp.float32) for name in tree}
    for number in range(3):
        before = reset_peak()
        start = time.perf_counter()
        eqx_ckpt.tree_serialise_leaves(folder / "ckpt", tree, overwrite=True)
        row(f"save {number}", [0, 0, time.perf_counter() - start], before)
        tree = jax.block_until_ready(step(tree))
    for number in range(3):
        before = reset_peak()
        start = time.perf_counter()
        path = folder / "background"
        saving = eqx_ckpt.tree_serialise_leaves_async(path, tree, overwrite=True)
        blocked = time.perf_counter() - start
        tree = jax.block_until_ready(step(tree))
        stepped = time.perf_counter() - start
        saving.result()
        seconds = [blocked, stepped, time.perf_counter() - start]
        row(f"save in the background {number}", seconds, before)
    for number in range(3):
        before = reset_peak()
        start = time.perf_counter()
        restored = eqx_ckpt.tree_deserialise_leaves(folder / "ckpt", like)
        jax.block_until_ready(restored)
        del restored
        row(f"restore {number}", [0, 0, time.perf_counter() - start], before)


def row(name: str, seconds: list[float], before: int) -> None:
    cells = " | ".join(f"{x:.3f}" if x else "" for x in seconds)
    print(f"| {name} | {cells} | {(peak_memory() - before) / 2**20:+.0f} |", flush=True)


if __name__ == "__main__":
    main()
