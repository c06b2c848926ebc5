"""Steps that share what is equal, beside steps that are written in full.

```bash
python -m benchmarks.incremental --width 768
```

Workload B, a training state, of which the optimiser's first moment of one block changes
with each step, or everything, or nothing does. The ways take turns in one process; each
has a run of its own, and keeps two steps. Seconds are the least of all rounds. Then
steps are restored and deleted, in turns too, and forked.

`--device` takes the arrays for those of an accelerator, where what is frozen has a
fingerprint: on a CPU, that shows what is left without the copy, not what a copy costs.
"""

import argparse
import contextlib
import functools as ft
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

import eqx_ckpt
from eqx_ckpt._saving import unchanged
from eqx_ckpt._storage.calls.posix_calls import flush

from .memory import warm_memory
from .workloads import filled, nbytes, state_of_width


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.incremental", description=__doc__
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--device", action="store_true")
    args = parser.parse_args()
    tree = filled(state_of_width(args.width))
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        place = mock.patch.object(unchanged, "is_on_host", return_value=False)
        with place if args.device else contextlib.nullcontext():
            found = compare(tree, args.rounds, Path(folder))
        restored = compare_restores(tree, args.rounds, Path(folder))
        deleted = compare_deletions(args.rounds, Path(folder))
        forked = compare_forks(tree, args.rounds, Path(folder))
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
    print(f"\nRestore of a step that shares files, to a plain one: {restored:.3f}")
    print(f"Deletion of one of 100 steps, to one of a plain run: {deleted:.3f}")
    print(f"A fork, to a plain save: {forked[0]:.3f}, processor time {forked[1]:.3f}")
    print(f"A fork, to the folders and links alone: {forked[2]:.3f}")


def compare(tree: PyTree, rounds: int, folder: Path) -> dict[str, list[float]]:
    """For each way, the least of what its saves took."""
    managers = {
        way: eqx_ckpt.CheckpointManager(
            folder / way.replace(" ", "-"),
            incremental=way != "a plain save",
            frozen=frozen(tree) if "frozen" in way else None,
            keep=eqx_ckpt.keep_last(2),
        )
        for way in WAYS
    }
    trees = dict.fromkeys(WAYS, tree)
    for way, manager in managers.items():
        measured(manager, 0, trees[way])
    found: dict[str, list[float]] = {}
    for step in range(1, rounds + 1):
        for way, manager in managers.items():
            trees[way] = jax.block_until_ready(WAYS[way](trees[way]))
            os.sync()
            warm_memory(2 * nbytes(tree))
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


@ft.partial(jax.jit, donate_argnums=0)
def stepped(tree: PyTree) -> PyTree:
    """A step of a training, through which the whole tree passes."""
    where = lambda tree: tree["optimiser"][0].mu.blocks[0]  # noqa: E731
    return eqx.tree_at(where, tree, jax.tree.map(lambda x: x + 1, where(tree)))


def in_a_step(tree: PyTree) -> PyTree:
    arrays, rest = eqx.partition(tree, eqx.is_array)
    # The other ways have the first tree.
    copies = jax.tree.map(lambda x: x.copy(), arrays)
    return eqx.combine(stepped(copies), rest)


def frozen(tree: PyTree) -> PyTree:
    """All arrays but those of the block."""
    where = lambda tree: tree["optimiser"][0].mu.blocks[0]  # noqa: E731
    flags = jax.tree.map(eqx.is_array, tree)
    return eqx.tree_at(where, flags, jax.tree.map(lambda _: False, where(flags)))


# What becomes of the tree before each save.
WAYS: dict[str, Callable[[PyTree], PyTree]] = {
    "a plain save": part_changed,
    "everything changes": changed,
    "little changes, in new arrays": part_changed_in_new_arrays,
    "little changes, frozen, in new arrays": part_changed_in_new_arrays,
    "little changes, frozen, in a step that donates": in_a_step,
    "little changes, the rest are the same objects": part_changed,
}


def compare_restores(tree: PyTree, rounds: int, folder: Path) -> float:
    """Seconds to restore a step of which all files are links, to a plain one."""
    runs = {way: folder / f"restored {way}" for way in (False, True)}
    for way, run in runs.items():
        with eqx_ckpt.CheckpointManager(run, incremental=way) as manager:
            for number in (1, 2):
                manager.save(number, tree).result()
    least: dict[bool, float] = {}
    for _ in range(rounds):
        for way, run in runs.items():
            start = time.perf_counter()
            path = run / "000002"
            jax.block_until_ready(eqx_ckpt.tree_deserialise_leaves(path, tree))
            seconds = time.perf_counter() - start
            least[way] = min(seconds, least.get(way, seconds))
    return least[True] / least[False]


def compare_forks(tree: PyTree, rounds: int, folder: Path) -> list[float]:
    """The least seconds of a fork, and its processor time, to those of a save.

    And its seconds to those of the least that is as durable.
    """
    found: list[list[float]] = []
    with eqx_ckpt.CheckpointManager(folder / "forked") as manager:
        for step in range(rounds):
            os.sync()
            warm_memory(2 * nbytes(tree))
            save = measured(manager, step, tree)[1:3]
            folders = [*os.walk(manager.path(step))]
            os.sync()
            start = time.perf_counter()
            link(folders, folder / f"linked {step}")
            linked = time.perf_counter() - start
            os.sync()
            cpu, start = time.process_time(), time.perf_counter()
            manager.fork(folder / f"fork {step}")
            seconds = time.perf_counter() - start
            found.append([*save, seconds, time.process_time() - cpu, linked])
    saved, cpu, forked, fork_cpu, linked = map(min, zip(*found, strict=True))
    return [forked / saved, fork_cpu / cpu, forked / linked]


def link(folders: Sequence[tuple[str, list[str], list[str]]], target: Path) -> None:
    """Make folders, and links to files, that are there durably or not at all."""
    hidden, above = f"{target}.tmp", os.open(target.parent, os.O_RDONLY)
    for folder, _, files in folders:
        new = hidden + folder.removeprefix(folders[0][0])
        os.mkdir(new)
        for file in files:
            os.link(f"{folder}/{file}", f"{new}/{file}")
    flush(above, hidden)
    os.rename(hidden, target)
    os.fsync(above)
    os.close(above)


def compare_deletions(rounds: int, folder: Path) -> float:
    """Seconds to delete a step in the middle of 100, to those in a plain run."""
    tree = {str(i): np.full(2000, i) for i in range(100)}
    managers = {
        way: eqx_ckpt.CheckpointManager(folder / f"deleted {way}", incremental=way)
        for way in (False, True)
    }
    for manager in managers.values():
        for number in range(100):
            manager.save(number, tree)
        manager.wait()
    least: dict[bool, float] = {}
    for number in range(40, 40 + rounds):
        for way, manager in managers.items():
            start = time.perf_counter()
            manager.delete(number)
            seconds = time.perf_counter() - start
            least[way] = min(seconds, least.get(way, seconds))
    return least[True] / least[False]


if __name__ == "__main__":
    main()
