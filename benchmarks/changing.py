"""Restores into code that has changed, beside plain restores of as many bytes.

```bash
python -m benchmarks.changing --width 768
```

Workload B, a training state; each way in a process of its own, in turns; the files are
in the page cache. "Fresh" is the first restore of such a process, "steady" the least of
those after it. Memory is what the first one adds at its peak, by the result's bytes.
"""

import argparse
import contextlib
import functools as ft
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

import eqx_ckpt

from .memory import warm_memory
from .workloads import filled, nbytes, state_of_width


LAYERS = 12
MANY = 5000
RENAMED = 20_000
STEADY = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.changing", description=__doc__
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--way", choices=WAYS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measured(WAYS[args.way], args.dir)))
    else:
        compare(args.width, args.rounds, args.dir)


def compare(width: int, rounds: int, scratch: Path | None) -> None:
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / "state"
        like = state_of_width(width)
        eqx_ckpt.tree_serialise_leaves(path, filled(like))
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                found[way].append(in_process(way, path))
    print(f"B of width {width}: {nbytes(like) / 2**30:.2f} GiB.\n")
    print("| | fresh, s | steady, s | memory / result |\n|---|---|---|---|")
    for way, results in found.items():
        fresh = min(result["fresh"] for result in results)
        steady = min(result["steady"] for result in results)
        memory = statistics.median(result["memory"] for result in results)
        print(f"| {way} | {fresh:.3f} | {steady:.3f} | {memory:.2f} |")
    print(f"\nPlanning {MANY} leaves: {planning():.2f} s.")
    print(f"Refusing {RENAMED} renamed leaves: {refusing():.2f} s of processor time.")


def in_process(way: str, path: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.changing", "--way", way]
    out = subprocess.run(
        [*command, "--dir", str(path)], check=True, capture_output=True, text=True
    )
    return json.loads(out.stdout)


def measured(way: Callable[[Path], Callable[[], PyTree]], path: Path) -> dict:
    restore = way(path)
    warm_memory(3 * 2**30)
    jax.block_until_ready(jax.jit(jnp.stack)([jnp.ones(3), jnp.ones(3)]))
    eqx_ckpt.tree_deserialise_leaves(path, jnp.zeros((), "int32"), prefix=COUNT)
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    fresh, tree = timed(restore)
    memory = (_memory("VmHWM") - before) / nbytes(tree)
    del tree
    steady = min(timed(restore)[0] for _ in range(STEADY))
    return {"fresh": fresh, "steady": steady, "memory": memory}


def timed(restore: Callable[[], PyTree]) -> tuple[float, PyTree]:
    start = time.perf_counter()
    tree = jax.block_until_ready(restore())
    return time.perf_counter() - start, tree


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":") for line in lines)[field].split()[0]) * 2**10


COUNT = "optimiser/0/count"


def restoring(path: Path, transform: Any = None, **how: Any) -> Callable[[], PyTree]:
    """A restore of what a transform makes; its skeleton is not measured."""
    like = eqx_ckpt.tree_like(path, prefix=how.get("prefix", ""))
    if transform is not None:
        like = jax.eval_shape(transform, like)
    return ft.partial(
        eqx_ckpt.tree_deserialise_leaves, path, like, transform=transform, **how
    )


def renamed(old: PyTree) -> PyTree:
    return {"net": old["model"], "state": old["optimiser"]}


def stacked(old: PyTree) -> PyTree:
    for part in (old["model"], old["optimiser"][0]["mu"], old["optimiser"][0]["nu"]):
        blocks = [part["blocks"][i] for i in range(LAYERS)]
        part["blocks"] = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks)
    return old


def cast(path: Path) -> Callable[[], PyTree]:
    """The bfloat16 model as float32."""
    like = eqx_ckpt.tree_like(path, prefix="optimiser/0/mu")
    return ft.partial(
        eqx_ckpt.tree_deserialise_leaves, path, like, prefix="model", casting="safe"
    )


WAYS: dict[str, Callable[[Path], Callable[[], PyTree]]] = {
    "plain": restoring,
    "renamed": ft.partial(restoring, transform=renamed),
    "stacked": ft.partial(restoring, transform=stacked),
    "plain float32 model": ft.partial(restoring, prefix="optimiser/0/mu"),
    "bfloat16 model as float32": cast,
}


def planning() -> float:
    """Half of the leaves is renamed, the others are stacked in tens."""
    tree = {f"part{i}": {f"leaf{j}": i for j in range(10)} for i in range(MANY // 10)}
    arrays = jax.tree.map(lambda i: jnp.zeros(3), tree)
    eqx_ckpt.tree_serialise_leaves("memory://many", arrays)

    def transform(old: PyTree) -> PyTree:
        for i in range(0, MANY // 10, 2):
            old[f"stack{i}"] = jnp.stack([*old.pop(f"part{i}").values()])
            old[f"other{i}"] = old.pop(f"part{i + 1}")
        return old

    like = jax.eval_shape(transform, eqx_ckpt.tree_like("memory://many"))
    start = time.perf_counter()
    match = eqx_ckpt.tree_match("memory://many", like, transform=transform)
    seconds = time.perf_counter() - start
    assert match.ok
    return seconds


def refusing() -> float:
    """The error of a restore into a tree in which a part is renamed; the least of 9."""
    layers = [{"weight": np.zeros(3), "bias": np.zeros(3)} for _ in range(RENAMED // 2)]
    eqx_ckpt.tree_serialise_leaves("memory://renamed", {"layers": layers})
    found: list[float] = []
    for _ in range(9):
        start = time.process_time()
        with contextlib.suppress(eqx_ckpt.LeafMismatchError):
            eqx_ckpt.tree_deserialise_leaves("memory://renamed", {"blocks": layers})
        found.append(time.process_time() - start)
    return min(found)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
