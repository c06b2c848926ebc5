"""Damage of files at rest, and what is said of it."""

import pathlib
import random
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import eqx_ckpt

from .workloads import every_kind


FLIPS = 8  # places in each file
REFUSALS = (eqx_ckpt.CorruptCheckpointError, eqx_ckpt.CheckpointNotFoundError)


def bits(tree: Any) -> list[bytes]:
    """The leaves' bits: a NaN is like itself, and -0.0 is not 0.0."""
    leaves = []
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and leaf.dtype == jax.random.key(0).dtype:
            leaf = jax.random.key_data(leaf)
        leaves.append(np.asarray(leaf).tobytes())
    return leaves


def files(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def report(path: pathlib.Path | str) -> str:
    """What `verify` says; a restore is refused too, or it is exact: never silent."""
    try:
        restored = eqx_ckpt.tree_deserialise_leaves(path, every_kind(0))
        refusal = ""
        assert bits(restored) == bits(every_kind(1)), "other values, without a word"
    except REFUSALS as e:
        refusal = str(e)
    try:
        eqx_ckpt.inspect.verify(path)
    except REFUSALS as e:
        return str(e)
    assert not refusal, f"`verify` finds nothing, but a restore says {refusal}"
    return ""


def damaged(data: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """Every kind of damage of a file's bytes that leaves a file there."""
    yield "truncation to nothing", b""
    yield "truncation by half", data[: len(data) // 2]
    yield "truncation by a byte", data[:-1]
    yield "appending", data + b"\0"
    yield "doubling", data + data
    yield "zeroing", bytes(len(data))
    places = random.Random(name)
    for _ in range(FLIPS):
        flipped = bytearray(data)
        bit = places.randrange(len(data) * 8)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"flipping bit {bit}", bytes(flipped)


def swap(one: pathlib.Path, two: pathlib.Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
