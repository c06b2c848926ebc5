"""Sources beside restores of as many bytes: averages, and safetensors in a bucket.

```bash
python -m benchmarks.sources --width 768
```

Workload B, a training state, of which a run has five steps, and a bucket one as a
checkpoint and one as a file of safetensors; each way in a process of its own, in turns.
The files of the run are in the page cache. Memory is what a way adds at its peak to
that of the result, in chunks of the sources.
"""

import argparse
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
from jaxtyping import PyTree

import eqx_ckpt

from .changing import _memory
from .stores import _BUCKET, _CREDENTIALS, _server
from .workloads import filled, nbytes, state_of_width


STEPS = range(5)
FILE = "model.safetensors"
# What each way is compared with, and how much longer it may take.
PAIRS = {
    "average of five": ("five restores", 1.1),
    "safetensors in S3": ("checkpoint in S3", 1.15),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sources", description=__doc__
    )
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--endpoint", default="")
    parser.add_argument("--way", choices=WAYS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measured(WAYS[args.way], args.dir, args.endpoint)))
    else:
        compare(args.width, args.rounds, args.dir)


def compare(width: int, rounds: int, scratch: Path | None) -> None:
    os.environ |= _CREDENTIALS
    with tempfile.TemporaryDirectory(dir=scratch) as name, _server("S3") as (url, _):
        folder, endpoint = Path(name), url or ""
        tree = filled(state_of_width(width))
        for step in STEPS:
            eqx_ckpt.tree_serialise_leaves(folder / str(step), tree)
        upload(folder / "0", folder / FILE, endpoint)
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                found[way].append(in_process(way, folder, endpoint))
    print(f"B of width {width}: {nbytes(tree) / 2**30:.2f} GiB.\n")
    print("| | seconds: least | median | processor time | memory, chunks |")
    print("|---|---|---|---|---|")
    for way, results in found.items():
        seconds, cpu, memory = (
            [result[key] for result in results] for key in ("seconds", "cpu", "memory")
        )
        median = statistics.median(seconds)
        shown = f"{min(seconds):.2f} | {median:.2f} | {min(cpu):.2f}"
        print(f"| {way} | {shown} | {statistics.median(memory):.1f} |")
    print()
    for way, (other, target) in PAIRS.items():
        ratios = [
            min(one[key] for one in found[way]) / min(one[key] for one in found[other])
            for key in ("seconds", "cpu")
        ]
        shown = f"{ratios[0]:.2f}, and {ratios[1]:.2f} of its processor time"
        print(f"{way}, to {other}: {shown}; the target is {target}.")


def upload(path: Path, file: Path, endpoint: str) -> None:
    """Put a checkpoint into the bucket, also as a file of safetensors."""
    import tensorstore as ts

    eqx_ckpt.copy(path, store("checkpoint", endpoint))
    eqx_ckpt.interop.to_safetensors(path, file)
    spec = {"driver": "s3", "bucket": _BUCKET, "endpoint": endpoint, "path": ""}
    credentials = {
        "aws_credentials": {"type": "environment"},
        "aws_region": "us-east-1",
    }
    bucket = ts.KvStore.open(spec | credentials).result()
    bucket.write(FILE, file.read_bytes()).result()


def store(name: str, endpoint: str) -> eqx_ckpt.StorePath:
    return eqx_ckpt.StorePath(f"s3://{_BUCKET}/{name}", endpoint=endpoint)


def in_process(way: str, folder: Path, endpoint: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.sources", "--way", way]
    out = subprocess.run(
        [*command, "--dir", str(folder), "--endpoint", endpoint],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(out.stdout)


def measured(way: Callable[[Path, str], Any], folder: Path, endpoint: str) -> dict:
    restore = way(folder, endpoint)
    largest = max(
        record.itemsize * _count(record.chunk_shape)
        for record in eqx_ckpt.inspect.read_manifest(folder / "0").leaves.values()
        if record.is_array
    )
    jax.block_until_ready(jax.device_put(1.0))
    Path("/proc/self/clear_refs").write_text("5")
    before, busy = _memory("VmRSS"), time.process_time()
    start = time.perf_counter()
    tree = jax.block_until_ready(restore())
    seconds, cpu = time.perf_counter() - start, time.process_time() - busy
    more = _memory("VmHWM") - before - nbytes(tree)
    return {"seconds": seconds, "cpu": cpu, "memory": more / largest}


def _count(shape: tuple[int, ...]) -> int:
    return 1 if not shape else shape[0] * _count(shape[1:])


def _paths(folder: Path) -> list[str]:
    return [str(folder / str(step)) for step in STEPS]


def averaging(folder: Path, endpoint: str) -> Callable[[], PyTree]:
    like = eqx_ckpt.tree_like(folder / "0")
    average = eqx_ckpt.average(_paths(folder))
    return lambda: eqx_ckpt.tree_deserialise_leaves(average, like)


def one_by_one(folder: Path, endpoint: str) -> Callable[[], PyTree]:
    like = eqx_ckpt.tree_like(folder / "0")

    def restore() -> PyTree:
        tree = None
        for path in _paths(folder):
            del tree
            found = eqx_ckpt.tree_deserialise_leaves(path, like)
            tree = jax.block_until_ready(found)
            del found
        return tree

    return restore


def remote_checkpoint(folder: Path, endpoint: str) -> Callable[[], PyTree]:
    place = store("checkpoint", endpoint)
    like = eqx_ckpt.tree_like(place)
    return lambda: eqx_ckpt.tree_deserialise_leaves(place, like)


def remote_safetensors(folder: Path, endpoint: str) -> Callable[[], PyTree]:
    source = eqx_ckpt.interop.open_safetensors(store(FILE, endpoint))
    like = eqx_ckpt.tree_like(source)
    return lambda: eqx_ckpt.tree_deserialise_leaves(source, like)


WAYS: dict[str, Callable[[Path, str], Callable[[], PyTree]]] = {
    "five restores": one_by_one,
    "average of five": averaging,
    "checkpoint in S3": remote_checkpoint,
    "safetensors in S3": remote_safetensors,
}


if __name__ == "__main__":
    main()
