"""Saves of jobs of many processes: what they say to each other.

```bash
python -m benchmarks.scale --processes 10 100 1000 10000
```

The processes are threads that run the real save into one directory, in a simulation of
JAX's coordination service, `tests/multiprocess/simulation.py`. So the seconds are those
of a job whose processes run side by side, and come out of the messages alone: neither
the disk nor this machine counts.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import eqx_ckpt
from tests.multiprocess.simulation import Counted, Simulation

from .table import markdown


_LEAVES = 100


def saves(size: int, saves: int = 2) -> tuple[list[list[Counted]], Simulation]:
    """What each process says in each of some saves of one run."""
    tree = {f"leaf{i}": np.arange(i + 1) for i in range(_LEAVES)}
    simulation = Simulation(size)
    counted = [list[Counted]() for _ in range(size)]
    with tempfile.TemporaryDirectory() as folder:

        def save(index: int) -> None:
            for step in range(saves):
                path = Path(folder) / f"{step:06d}"
                eqx_ckpt.tree_serialise_leaves(path, tree)
                counted[index].append(simulation.clients[index].counted())

        simulation.play(save)
    return counted, simulation


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__
    )
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[10, 100, 1000, 10_000]
    )
    args = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    for size in args.processes:
        counted, simulation = saves(size)
        # The second save: the processes have met before.
        first, *others = [after.since(before) for before, after in counted]
        most = max(others)
        seconds = max(of[1].end for of in counted) - min(of[0].end for of in counted)
        rows.append(
            (
                f"{size:,}",
                f"{first.requests:,}",
                f"{first.sent / 1024:,.0f} / {first.received / 1024:,.0f} KiB",
                f"{most.requests:,}",
                f"{most.sent / 1024:,.1f} / {most.received / 1024:,.1f} KiB",
                f"{simulation.most_bytes / 2**20:,.1f} MiB",
                f"{seconds:.2f} s",
            )
        )
    print(markdown(_HEAD, rows))


_HEAD = (
    "processes",
    "requests of process 0",
    "sent / received",
    "of any other",
    "sent / received",
    "held by the service",
    "seconds",
)


if __name__ == "__main__":
    main()
