"""How long a batch takes: inside jit, on the device, and outside, beside its peers.

```bash
pip install grain torch
python -m benchmarks.data
```

100,000 rows of float32[100], batches of 100; then 10^8 rows of one byte, batches of
1,024. Peers that are not installed are left out.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from eqx_ckpt.data import ArrayDataSource, Loader


ROWS, WIDTH, BATCH = 100_000, 100, 100
# Short rounds, of which the least was hardly disturbed; in jit and of the peers.
ROUNDS, BATCHES = 20, 300
# Of what fetches ahead: more than it may have fetched between two rounds.
MANY = 3000
# Of rows that are one byte each.
BYTES, BYTES_BATCH, EPOCHS = 10**8, 1024, 5


# CPU and wall time, for each batch.
Seconds = tuple[float, float]


def main() -> None:
    rows = np.random.default_rng(0).random((ROWS, WIDTH), np.float32)
    in_batches = "microseconds a batch: CPU, least | median | wall, least"
    head(in_batches)
    compare(
        {
            f"in jit, cache={cache}": in_jit(Loader(source(rows), BATCH, cache=cache))
            for cache in (1, 10, 100)
        }
        | {
            "in jit, on the device": in_jit(
                Loader(source(rows, on_device=True), BATCH)
            ),
            "in jit, block of 100": in_blocks(Loader(source(rows), BATCH), 100),
        }
    )
    compare({"iterate, prefetch=2": iterated(rows), "a NumPy gather": gathered(rows)})
    head("an epoch over 10^8 rows of a byte, s: CPU, least | median | wall, least")
    compare_epochs()
    head("`map` over rows of a byte: CPU, s | memory of the program, MB")
    for count in (10**6, 10**7, BYTES):
        seconds, megabytes = epoch(count, size=10_000, cache=10)
        print(f"| {count:,} | {seconds:.2f} | {megabytes:.1f} |")
    # By themselves: their threads go on when the turn is another's.
    head(in_batches)
    compare({name: outside(batches, BATCHES) for name, batches in peers(rows)})


def head(columns: str) -> None:
    print(f"\n| | {columns} |\n|---|{'---|' * (columns.count('|') + 1)}")


def compare(
    ways: dict[str, Callable[[], Seconds]], rounds: int = ROUNDS, scale: float = 1e6
) -> None:
    """Take turns, and print what each way took, times `scale`."""
    found: dict[str, list[Seconds]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(way())
    for name, times in found.items():
        cpu, wall = zip(*times, strict=True)
        shown = min(cpu), statistics.median(cpu), min(wall)
        print(f"| {name} | " + " | ".join(f"{scale * x:.2f}" for x in shown) + " |")


def compare_epochs() -> None:
    whole = source(np.ones(BYTES, np.int8))
    loader = Loader(whole, BYTES_BATCH, cache=10)
    count = loader.batches_per_epoch
    ways = {
        "in jit, cache=10": in_jit(loader, count),
        "in jit, block of 100": in_blocks(Loader(whole, BYTES_BATCH), 100, count),
        "iterate, prefetch=2": outside(loader.iterate(loader.start()), count),
    }
    compare(ways, EPOCHS, count)


def source(rows: np.ndarray, **kwargs: bool) -> ArrayDataSource:
    return ArrayDataSource(x=rows, **kwargs)


def in_jit(loader: Loader, count: int = BATCHES) -> Callable[[], Seconds]:
    """What a batch takes in a scan that only draws them."""

    @eqx.filter_jit
    def run(loader: Loader, cursor: Any) -> Any:
        def step(cursor: Any, _: None) -> tuple[Any, Any]:
            cursor, batch = loader.next(cursor)
            return cursor, jnp.sum(batch["x"][0])

        return jax.lax.scan(step, cursor, length=count)[1]

    cursor = loader.start()
    return timed(lambda: jax.block_until_ready(run(loader, cursor)), count)


def in_blocks(loader: Loader, k: int, count: int = BATCHES) -> Callable[[], Seconds]:
    @jax.jit
    def run(cursor: Any) -> Any:
        def step(cursor: Any, _: None) -> tuple[Any, Any]:
            cursor, batches = loader.block(cursor, k)
            return cursor, jnp.sum(batches["x"][:, 0])

        return jax.lax.scan(step, cursor, length=count // k)[1]

    cursor = loader.start()
    return timed(lambda: jax.block_until_ready(run(cursor)), count // k * k)


def epoch(count: int, size: int, cache: int) -> tuple[float, float]:
    """Seconds of CPU, and MB of a program, for `map` over rows of one byte."""
    loader = Loader(source(np.ones(count, np.int8)), size, cache=cache)

    def total(carry: Any, batch: Any, mask: Any) -> tuple[Any, None]:
        return carry + jnp.sum(batch["x"] * mask, dtype=jnp.int32), None

    program = jax.jit(lambda: loader.map(total, jnp.int32(0))[0]).lower().compile()
    memory: Any = program.memory_analysis()
    start = time.process_time()
    assert int(program()) == count
    return time.process_time() - start, memory.temp_size_in_bytes / 1e6


def timed(run: Callable[[], Any], batches: int) -> Callable[[], Seconds]:
    run()

    def once() -> Seconds:
        cpu, wall = time.process_time(), time.perf_counter()
        run()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return cpu / batches, wall / batches

    return once


def outside(batches: Iterator[Any], count: int) -> Callable[[], Seconds]:
    """What a batch takes of an iterator that goes on and on."""

    def run() -> None:
        for _ in itertools.islice(batches, count):
            pass

    return timed(run, count)


def iterated(rows: np.ndarray) -> Callable[[], Seconds]:
    loader = Loader(source(rows), BATCH, cache=10)
    return outside(loader.iterate(loader.start(), prefetch=2), MANY)


def gathered(rows: np.ndarray) -> Callable[[], Seconds]:
    def batches() -> Iterator[np.ndarray]:
        generator = np.random.default_rng(0)
        while True:
            order = generator.permutation(ROWS).reshape(-1, BATCH)
            yield from (rows[indices] for indices in order)

    return outside(batches(), MANY)


def peers(rows: np.ndarray) -> Iterator[tuple[str, Iterator[Any]]]:
    try:
        import grain

        dataset = grain.MapDataset.source(rows).shuffle(seed=0).repeat().batch(BATCH)
        yield "Grain, MapDataset", iter(dataset)
    except ImportError:
        pass
    try:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        tensors = TensorDataset(torch.from_numpy(rows))
        loader = DataLoader(tensors, BATCH, shuffle=True)
        yield "torch, DataLoader", (b for _ in itertools.count() for b in loader)
    except ImportError:
        pass


if __name__ == "__main__":
    main()
