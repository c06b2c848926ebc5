"""How long a batch takes: inside jit, on the device, and outside, beside its peers.

```bash
pip install grain torch
python -m benchmarks.data
```

100,000 rows of float32[100], batches of 100. Peers that are not installed are left out.
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


def main() -> None:
    rows = np.random.default_rng(0).random((ROWS, WIDTH), np.float32)
    print("| | microseconds a batch: least | median |")
    print("|---|---|---|")
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
    print("\n| `map` over rows of a byte | CPU, s | memory of the program, MB |")
    print("|---|---|---|")
    for count in (10**6, 10**7, 10**8):
        seconds, megabytes = epoch(count, size=10_000, cache=10)
        print(f"| {count:,} | {seconds:.2f} | {megabytes:.1f} |")
    print("\n| | microseconds a batch: least | median |\n|---|---|---|")
    # By themselves: their threads go on when the turn is another's.
    compare({name: outside(batches, BATCHES) for name, batches in peers(rows)})


def compare(ways: dict[str, Callable[[], float]]) -> None:
    """Take turns, and print what each way took."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            found[name].append(1e6 * way())
    for name, times in found.items():
        print(f"| {name} | {min(times):.1f} | {statistics.median(times):.1f} |")


def source(rows: np.ndarray, **kwargs: bool) -> ArrayDataSource:
    return ArrayDataSource(x=rows, **kwargs)


def in_jit(loader: Loader) -> Callable[[], float]:
    """Seconds for a batch of a scan that only draws them."""

    @eqx.filter_jit
    def run(loader: Loader, cursor: Any) -> Any:
        def step(cursor: Any, _: None) -> tuple[Any, Any]:
            cursor, batch = loader.next(cursor)
            return cursor, jnp.sum(batch["x"][0])

        return jax.lax.scan(step, cursor, length=BATCHES)[1]

    cursor = loader.start()
    return timed(lambda: jax.block_until_ready(run(loader, cursor)), BATCHES)


def in_blocks(loader: Loader, k: int) -> Callable[[], float]:
    @jax.jit
    def run(cursor: Any) -> Any:
        def step(cursor: Any, _: None) -> tuple[Any, Any]:
            cursor, batches = loader.block(cursor, k)
            return cursor, jnp.sum(batches["x"][:, 0])

        return jax.lax.scan(step, cursor, length=BATCHES // k)[1]

    cursor = loader.start()
    return timed(lambda: jax.block_until_ready(run(cursor)), BATCHES)


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


def timed(run: Callable[[], Any], batches: int) -> Callable[[], float]:
    run()

    def once() -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) / batches

    return once


def outside(batches: Iterator[Any], count: int) -> Callable[[], float]:
    """Seconds for a batch of an iterator that goes on and on."""
    next(batches)

    def once() -> float:
        start = time.perf_counter()
        for _ in itertools.islice(batches, count):
            pass
        return (time.perf_counter() - start) / count

    return once


def iterated(rows: np.ndarray) -> Callable[[], float]:
    loader = Loader(source(rows), BATCH, cache=10)
    return outside(loader.iterate(loader.start(), prefetch=2), MANY)


def gathered(rows: np.ndarray) -> Callable[[], float]:
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
