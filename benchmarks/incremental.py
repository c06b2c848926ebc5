"""Steps that share what is equal, beside steps that are written in full.

```bash
python -m benchmarks.incremental --width 768
```

Workload B, a training state, of which the optimiser's first moment of one block changes
with each step, or everything, or nothing does. The ways take turns in one process; each
has a run of its own, and keeps two steps. Seconds are the least of all rounds.
"""

import argparse
import functools as ft
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
from jaxtyping import PyTree

import eqx_ckpt

from .workloads import filled, nbytes, train_state


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.incremental", description=__doc__
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    vocabulary = 50257 * args.width // 768
    make = ft.partial(train_state, width=args.width, vocabulary=vocabulary)
    tree = filled(eqx.filter_eval_shape(make, jax.random.key(0)))
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        found = compare(tree, args.rounds, Path(folder))
    plain = found["a plain save"]
    print(f"B of width {args.width}: {nbytes(tree) / 2**30:.2f} GiB.\n")
    print("| | blocked | until durable | processor time | bytes written |")
    print("|---|---|---|---|---|")
    for way, least in found.items():
        cells = (
            f"{a:.3f} ({a / b:.3f})" for a, b in zip(least[:3], plain[:3], strict=True)
        )
        written = f"{least[3] / 2**20:.1f} MiB ({least[3] / plain[3]:.4f})"
        print(f"| {way} | {' | '.join(cells)} | {written} |")


def compare(tree: PyTree, rounds: int, folder: Path) -> dict[str, list[float]]:
    """For each way, the least of what its saves took."""
    managers = {
        way: eqx_ckpt.CheckpointManager(
            folder / way.replace(" ", "-"),
            incremental=incremental,
            keep=eqx_ckpt.keep_last(2),
        )
        for way, (incremental, _) in WAYS.items()
    }
    trees = dict.fromkeys(WAYS, tree)
    for way, manager in managers.items():
        measured(manager, 0, trees[way])
    found: dict[str, list[float]] = {}
    for step in range(1, rounds + 1):
        for way, manager in managers.items():
            trees[way] = jax.block_until_ready(WAYS[way][1](trees[way]))
            os.sync()
            now = measured(manager, step, trees[way])
            found[way] = [*map(min, found.get(way, now), now)]
    return found


def measured(
    manager: eqx_ckpt.CheckpointManager, step: int, tree: PyTree
) -> list[float]:
    written, cpu, start = _written(), time.process_time(), time.perf_counter()
    saving = manager.save(step, tree)
    blocked = time.perf_counter() - start
    saving.result()
    seconds = time.perf_counter() - start
    return [blocked, seconds, time.process_time() - cpu, _written() - written]


def _written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def changed(tree: PyTree) -> PyTree:
    """All of it."""
    return jax.tree.map(lambda x: x + 1, tree)


def part_changed(tree: PyTree) -> PyTree:
    """A block of the first moment: the others are the same objects."""
    where = lambda tree: tree["optimiser"][0].mu.blocks[0]  # noqa: E731
    return eqx.tree_at(where, tree, changed(where(tree)))


def part_changed_in_new_arrays(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.copy(), part_changed(tree))


# Whether the manager is incremental, and what becomes of the tree before each save.
WAYS: dict[str, tuple[bool, Callable[[PyTree], PyTree]]] = {
    "a plain save": (False, part_changed),
    "everything changes": (True, changed),
    "little changes, in new arrays": (True, part_changed_in_new_arrays),
    "little changes, the rest are the same objects": (True, part_changed),
}


if __name__ == "__main__":
    main()
