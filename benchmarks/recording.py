"""How long recording takes, beside a bare scan, and one write at the end.

```bash
python -m benchmarks.recording
```

Samples of float32[1000], blocks of 250. All is written below the working directory.
"""

import argparse
import functools as ft
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

import eqx_ckpt
from eqx_ckpt.recording import Recording, Samples


WIDTH, BLOCK = 1000, 250
LIKE = {"x": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)}
SMALL = {"x": jax.ShapeDtypeStruct((10,), jnp.float32)}
# Steps with a callback for each, which take as long as all others with theirs.
CALLBACKS = 5000
# Chains, and draws that each of them adds between two commits.
MANY = [
    *((1, 50_000), (10, 5000), (100, 500), (1000, 50), (10_000, 5)),
    *((4000, 1), (4000, 20), (10_000, 50)),
]


def step(state: Any, _: None) -> tuple[Any, Any]:
    """As little as possible: all samples are different, and none is constant."""
    x = state + 1.0
    return x, {"x": x}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--draws", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="recording-", dir="."))
    try:
        times = per_step(scratch, arguments.steps, arguments.repeats)
        print("| | microseconds a step: median | least | greatest | CPU |")
        print("|---|---|---|---|---|")
        for name, (found, cpu) in times.items():
            row = (statistics.median(found), min(found), max(found), min(cpu))
            print(f"| {name} | " + " | ".join(f"{1e6 * t:.1f}" for t in row) + " |")
        print("\n| | milliseconds: median | least | greatest |\n|---|---|---|---|")
        for name, found in once(scratch, arguments.draws, arguments.repeats).items():
            row = (statistics.median(found), min(found), max(found))
            print(f"| {name} | " + " | ".join(f"{1e3 * t:.1f}" for t in row) + " |")
        print(
            "\n| chains, draws | MB | on disk / MB | commit, ms: wall, CPU | read, ms |"
        )
        print("|---|---|---|---|---|")
        for chains, draws in MANY:
            print(many(scratch / "many", chains, draws, arguments.repeats))
    finally:
        shutil.rmtree(scratch)


def many(path: Path, chains: int, draws: int, repeats: int) -> str:
    """A row of a table: what so many chains cost; the least of some commits."""
    like = {"theta": np.zeros(10, np.float32), "energy": np.float32(0)}
    random = np.random.default_rng(0).random
    wall, cpu = [], []
    with Recording(path, like, chains=chains) as recording:
        for _ in range(repeats):
            theta = random((chains, draws, 10), np.float32)
            recording.extend({"theta": theta, "energy": theta[..., 0]})
            recording._log._writer.drain()  # pyright: ignore[reportPrivateUsage]
            start = time.process_time()
            wall.append(timed(lambda: recording.commit({"step": 1})))
            cpu.append(time.process_time() - start)
    read = min(timed(lambda: Samples(path).read()) for _ in range(repeats))
    nbytes = repeats * chains * draws * 44
    files = [file for file in path.rglob("*") if file.is_file()]
    disk = sum(512 * file.stat().st_blocks for file in files)
    shutil.rmtree(path)
    return (
        f"| {chains:,} x {repeats * draws:,} | {nbytes / 1e6:.1f} "
        f"| {disk / nbytes:.2f} | {1e3 * min(wall):.0f}, {1e3 * min(cpu):.0f} "
        f"| {1e3 * read:.0f} |"
    )


def per_step(
    scratch: Path, steps: int, repeats: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds a step of each way, and of CPU, in turns.

    But for the first way, beyond the bare scan.
    """
    ways: dict[str, tuple[Callable[[Path], None], int]] = {
        "bare scan": (lambda _: bare(steps), steps),
        "`record_scan`": (lambda path: recorded(path, steps), steps),
        "blocks, and `extend`": (lambda path: extended(path, steps), steps),
        "stack everything, write once": (lambda path: stacked(path, steps), steps),
        "a callback for each step": (lambda _: called(CALLBACKS), CALLBACKS),
    }
    found = {name: ([], []) for name in ways}
    for i in range(repeats + 1):
        for name, (way, count) in ways.items():
            path = scratch / "run"
            start = time.process_time()
            seconds = timed(lambda way=way, path=path: way(path)) / count
            cpu = (time.process_time() - start) / count
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
            if i:  # The first one compiles.
                found[name][0].append(seconds)
                found[name][1].append(cpu)
    least, least_cpu = map(statistics.median, found["bare scan"])
    return {
        name: (times, cpu)
        if name == "bare scan"
        else ([t - least for t in times], [t - least_cpu for t in cpu])
        for name, (times, cpu) in found.items()
    }


def once(scratch: Path, draws: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of what is done now and then, with a recording of so many draws."""
    path = scratch / "long"
    state = {"x": jnp.zeros(WIDTH), "step": 0}
    block = {"x": np.random.default_rng(0).random((10_000, 10), np.float32)}
    with Recording(path, SMALL) as recording:
        for _ in range(draws // 10_000):
            recording.extend(block)
        recording.commit(state)
    found: dict[str, list[float]] = {
        "commit": [],
        "resume": [],
        "read a leaf": [],
        "read as a checkpoint": [],
    }
    eqx_ckpt.copy(path, scratch / "plain")
    like = {"x": np.zeros((draws, 10), np.float32)}
    for _ in range(repeats):
        start = time.perf_counter()
        with Recording(path, SMALL) as recording:
            recording.resume(state)
            found["resume"].append(time.perf_counter() - start)
        reading = Samples(path).read
        found["read a leaf"].append(timed(reading))
        seconds = timed(
            lambda: eqx_ckpt.tree_deserialise_leaves(scratch / "plain", like)
        )
        found["read as a checkpoint"].append(seconds)
    with Recording(scratch / "commits", LIKE) as recording:
        for _ in range(4 * repeats):
            recording.extend({"x": np.zeros((BLOCK, WIDTH), np.float32)})
            recording._log._writer.drain()  # pyright: ignore[reportPrivateUsage]
            found["commit"].append(timed(lambda: recording.commit(state)))
    return found


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@jax.jit
def block(state: Any) -> tuple[Any, Any]:
    return jax.lax.scan(step, state, None, length=BLOCK)


def bare(steps: int) -> None:
    """The blocks of a scan, whose samples are dropped."""
    state = jnp.zeros(WIDTH)
    for _ in range(steps // BLOCK):
        state, _ = block(state)
    jax.block_until_ready(state)


def recorded(path: Path, steps: int) -> None:
    with Recording(path, LIKE) as recording:
        state = jnp.zeros(WIDTH)
        eqx_ckpt.recording.record_scan(
            step, state, length=steps, recording=recording, block=BLOCK
        )


def extended(path: Path, steps: int) -> None:
    state = jnp.zeros(WIDTH)
    with Recording(path, LIKE) as recording:
        for _ in range(steps // BLOCK):
            state, samples = block(state)
            recording.extend(samples)
        recording.commit({"x": state})


def stacked(path: Path, steps: int) -> None:
    """All samples in memory, then one checkpoint."""
    state, samples = stack(jnp.zeros(WIDTH), steps)
    eqx_ckpt.tree_serialise_leaves(path, {"x": samples["x"], "state": state})


@ft.partial(jax.jit, static_argnums=1)
def stack(state: Any, steps: int) -> tuple[Any, Any]:
    return jax.lax.scan(step, state, None, length=steps)


def called(steps: int) -> None:
    """A callback in each step, which takes the sample and does nothing with it."""
    jax.block_until_ready(call(jnp.zeros(WIDTH), steps))


@ft.partial(jax.jit, static_argnums=1)
def call(state: Any, steps: int) -> Any:
    def once(state: Any, _: None) -> tuple[Any, None]:
        state, sample = step(state, None)
        done = io_callback(take, jax.ShapeDtypeStruct((), np.bool_), sample["x"])
        return state + 0.0 * done, None

    return jax.lax.scan(once, state, None, length=steps)[0]


def take(x: Any) -> np.ndarray:
    return np.zeros((), bool)


if __name__ == "__main__":
    main()
