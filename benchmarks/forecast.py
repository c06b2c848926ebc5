"""`python -m benchmarks.forecast`: the host memory of restores, beside its forecast.

Each tree is saved by a process, and restored by others from the page cache: once as
usual, and once with the least `max_host_bytes`. The resident memory that a restore adds
at its peak is compared with what `tree_match` said before. Its first restore in a
process is of one small leaf, for what JAX and Python load once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

import eqx_ckpt

from .measure import peak_memory, reset_peak, ROOT
from .table import markdown
from .workloads import filled, skeleton, target


MIB = 2**20


class Tree(NamedTuple):
    """What is saved, what it is restored into, and how."""

    name: str
    saved: Callable[[str], PyTree]
    like: Callable[[str], PyTree]
    layout: dict[str, Any] = {}
    how: dict[str, Any] = {}


def _as(dtype: Any, scale: str) -> PyTree:
    structs = skeleton("A", scale)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), structs)


def _doubled(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x + x, tree)


TREES = {
    "A": Tree(
        "A: 16 arrays of 128 MiB",
        lambda scale: skeleton("A", scale),
        lambda scale: skeleton("A", scale),
    ),
    "B": Tree(
        "B: a training state",
        lambda scale: skeleton("B", scale),
        lambda scale: skeleton("B", scale),
    ),
    "compressed": Tree(
        "B, compressed",
        lambda scale: skeleton("B", scale),
        lambda scale: skeleton("B", scale),
        {"compression": "zstd"},
    ),
    "C": Tree(
        "C: 5,000 small arrays",
        lambda scale: skeleton("C", scale),
        lambda scale: skeleton("C", scale),
    ),
    "E": Tree(
        "A on another mesh",
        lambda scale: skeleton("E", scale),
        lambda scale: target("E", scale),
    ),
    "cast": Tree(
        "A to bfloat16",
        lambda scale: skeleton("A", scale),
        lambda scale: _as(jnp.bfloat16, scale),
        how={"casting": "same_kind"},
    ),
    "computed": Tree(
        "A, computed",
        lambda scale: skeleton("A", scale),
        lambda scale: skeleton("A", scale),
        how={"transform": _doubled},
    ),
}
SAVED = "saved"
BOUNDS = ("usual", "least")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.forecast", description=__doc__
    )
    parser.add_argument("--trees", nargs="+", choices=TREES, default=list(TREES))
    parser.add_argument("--scale", choices=("small", "full"), default="full")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--process", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process:
        name, bound, path = args.process
        print(json.dumps(in_this_process(name, bound, args.scale, Path(path))))
        return
    rows: list[list[str]] = []
    for name in args.trees:
        with tempfile.TemporaryDirectory(dir=args.dir) as text:
            folder = Path(text)
            in_process(name, SAVED, args.scale, folder)
            for bound in BOUNDS:
                found = in_process(name, bound, args.scale, folder)
                rows.append([TREES[name].name, bound, *_row(found)])
    head = [
        "",
        "memory",
        "to read, MiB",
        "requests",
        "forecast, MiB",
        "measured",
        "ratio",
    ]
    print(markdown(head, rows))


def _row(found: dict[str, Any]) -> list[str]:
    ratio = found["measured"] / found["forecast"]
    return [
        f"{found['nbytes'] / MIB:.0f}",
        f"{found['requests']}",
        f"{found['forecast'] / MIB:.0f}",
        f"{found['measured'] / MIB:.0f}",
        f"{ratio:.2f}",
    ]


def in_process(name: str, bound: str, scale: str, path: Path) -> Any:
    """What a fresh process does, and finds."""
    what = ["--scale", scale, "--process", name, bound, str(path)]
    devices = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.forecast", *what],
        check=True,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices},
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def in_this_process(name: str, bound: str, scale: str, path: Path) -> Any:
    return (save if bound == SAVED else restore)(TREES[name], bound, scale, path)


def save(tree: Tree, bound: str, scale: str, path: Path) -> None:
    state = filled(tree.saved(scale))
    eqx_ckpt.tree_serialise_leaves(path / "tree", state, **tree.layout)
    eqx_ckpt.tree_serialise_leaves(path / "small", {"w": jnp.ones(2)})


def restore(tree: Tree, bound: str, scale: str, path: Path) -> dict[str, Any]:
    """What was forecast, and what was measured."""
    like = tree.like(scale)
    match = eqx_ckpt.tree_match(path / "tree", like, **tree.how)
    eqx_ckpt.tree_deserialise_leaves(path / "small", {"w": jnp.ones(2)})
    most = match.least_host_bytes if bound == "least" else None
    before = reset_peak()
    restored = eqx_ckpt.tree_deserialise_leaves(
        path / "tree", like, max_host_bytes=most, **tree.how
    )
    jax.block_until_ready(restored)
    return {
        "nbytes": match.nbytes,
        "requests": match.requests,
        "forecast": match.host_bytes if most is None else most,
        "measured": peak_memory() - before,
    }


if __name__ == "__main__":
    main()
