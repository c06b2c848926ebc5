"""A run with a mirror in a store that is far away, beside the same without one.

```bash
python -m benchmarks.mirror --mib 256
```

The store is the S3 of `benchmarks.stores`, in a process of its own on this machine,
which waits 20 ms before each answer, and has the lowest priority. In each round, the
ways take turns, and an upload goes on during each save, and each step, of a run with a
mirror. Seconds are the least of all rounds, and ratios are those of them.
"""

import argparse
import functools as ft
import os
import shutil
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

from .measure import peak_memory, reset_peak
from .memory import warm_memory
from .stores import _CREDENTIALS, _server, Place
from .table import markdown


MIB = 2**20
_ARRAYS = 16
_TIMEOUT = 600.0

# What is measured, beside what, and the most that the ratio should be.
_RATIOS = {
    "save with a mirror": ("save", 1.05),
    "save and step with a mirror": ("save and step", 1.1),
    "upload": ("copy", 1.15),
    "restore from the local disk, of a step": ("restore of a step", 1.02),
    "restore from the local disk, of the newest": ("restore of the newest", 1.02),
    "restore without the local disk": ("restore from the store", 1.1),
}


class Seconds(dict[str, float]):
    """The least of all rounds, each in memory that was touched before."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes = nbytes

    def note(self, what: str, call: Callable[[], Any]) -> Any:
        warm_memory(self._nbytes)
        start = time.perf_counter()
        found = jax.block_until_ready(call())
        seconds = time.perf_counter() - start
        self[what] = min(seconds, self.get(what, seconds))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mirror", description=__doc__
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path)
    args = parser.parse_args()
    os.environ.update(_CREDENTIALS)
    seconds, memory = Seconds(2 * args.mib * MIB), 0
    numbers = np.random.default_rng(0).standard_normal(
        (_ARRAYS, args.mib * MIB // 4 // _ARRAYS), np.float32
    )
    tree = {f"array{i}": jnp.asarray(array) for i, array in enumerate(numbers)}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for number in range(args.rounds):
            place = Path(folder) / str(number)
            with _server("S3, 20 ms") as (endpoint, server):
                # A store that is far away takes no core from the training.
                os.setpriority(os.PRIO_PROCESS, server, 19)
                memory = max(memory, measure(tree, place, endpoint, seconds))
            shutil.rmtree(place)
    rows: list[tuple[str, ...]] = []
    for what, (beside, target) in _RATIOS.items():
        mine, other = seconds[what], seconds[beside]
        times = f"{mine:.3f} s", f"{beside}: {other:.3f} s"
        rows.append((what, *times, f"{mine / other:.3f}", f"<= {target}"))
    print(f"{args.mib} MiB, {args.rounds} rounds.\n")
    print(markdown(("measured", "", "against", "ratio", "target"), rows))
    print(f"\nMemory of an upload: {memory / MIB:.0f} MiB.")


def measure(tree: PyTree, place: Path, endpoint: str | None, seconds: Seconds) -> int:
    """Measure each way once; return the memory of an upload."""
    there = Place(Path(f"run-{place.name}"), endpoint).ours
    mirror = eqx_ckpt.Mirror(there, timeout=_TIMEOUT)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    with eqx_ckpt.CheckpointManager(place / "plain") as plain:
        plain.save(1, tree).result()
        os.sync()
        seconds.note("save", lambda: plain.save(2, tree).result())
        plain.wait()
        saved = ft.partial(_save_and_step, plain, 3, _copied(tree))
        seconds.note("save and step", saved)
    with eqx_ckpt.CheckpointManager(place / "mirrored", mirror=mirror) as mirrored:
        mirrored.save(1, tree).result()
        os.sync()
        what = "save with a mirror"
        seconds.note(what, lambda: mirrored.save(2, tree).result())
        what = "save and step with a mirror"
        saved = ft.partial(_save_and_step, mirrored, 3, _copied(tree))
        seconds.note(what, saved)
        if all(upload.done() for upload in mirrored.uploads().values()):
            raise SystemExit("No upload went on during the step: take a larger --mib.")
        mirrored.wait()
        mirrored.uploads()[3].result(_TIMEOUT)
        mirrored.save(4, tree).result()
        mirrored.uploads()[4].result(_TIMEOUT)
        os.sync()
        source = place / "mirrored/000004"
        targets = [
            Place(Path(f"{what}-{place.name}"), endpoint).ours
            for what in ("upload", "copy")
        ]
        seconds.note("upload", ft.partial(_upload, source.parent, targets[0]))
        seconds.note("copy", ft.partial(eqx_ckpt.copy, source, targets[1]))
        alone = eqx_ckpt.CheckpointManager(place / "mirrored")
        for step, words in ((4, "of a step"), (None, "of the newest")):
            what = f"restore {words}"
            seconds.note(what, ft.partial(alone.restore, like, step))
            what = f"restore from the local disk, {words}"
            seconds.note(what, ft.partial(mirrored.restore, like, step))
        mirrored.save(5, tree).result()
        memory = reset_peak()
        mirrored.uploads()[5].result(_TIMEOUT)
        memory = peak_memory() - memory
    far = eqx_ckpt.CheckpointManager(there)
    seconds.note("restore from the store", lambda: far.restore(like))
    with eqx_ckpt.CheckpointManager(place / "new", mirror=mirror) as new:
        found = seconds.note(
            "restore without the local disk", lambda: new.restore(like)
        )
    assert all(jax.tree.leaves(jax.tree.map(jnp.array_equal, found, tree)))
    return memory


def _upload(run: Path, there: Any) -> None:
    """The newest step, by a new manager, to a place that has nothing."""
    mirror = eqx_ckpt.Mirror(there, timeout=_TIMEOUT)
    with eqx_ckpt.CheckpointManager(run, mirror=mirror) as manager:
        pass
    assert manager.uploads()[4].result() is None


def _copied(tree: PyTree) -> PyTree:
    return jax.block_until_ready(jax.tree.map(jnp.copy, tree))


@ft.partial(jax.jit, donate_argnums=0)
def _step(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x * 1.5 + 1, tree)


def _save_and_step(
    manager: eqx_ckpt.CheckpointManager, number: int, tree: PyTree
) -> PyTree:
    manager.save(number, tree)
    return _step(tree)


if __name__ == "__main__":
    main()
