"""Every kind of leaf in a job of several processes; each function runs in all."""

import pathlib

import jax

import eqx_ckpt

from . import leaves, likes
from .check import differences
from .ways import DIRECT


LIKES = (
    "itself",
    "same",
    "jax",
    "numpy",
    "struct",
    "struct everywhere",
    "struct in rows",
)


def run(path: pathlib.Path) -> list[str]:
    saved = leaves.tree(leaves.SOME)
    if jax.__version_info__ < (0, 10):
        # Its programs of several processes cannot shard an array without elements.
        del saved["weak_empty"]
    eqx_ckpt.tree_serialise_leaves(path, {"part": saved}, deadline=40.0)
    return [
        f"{line} [{name}]"
        for name in LIKES
        for line in differences(path, saved, likes.made(name, saved), DIRECT)
    ]
