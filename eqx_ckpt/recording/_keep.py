"""Select the draws of a block that are recorded."""

from typing import Any

import jax
import numpy as np


def kept_of(
    keep: np.ndarray | None, taken: np.ndarray, draws: int, most: int | None
) -> tuple[np.ndarray | None, np.ndarray]:
    """Which draws of a block to record, and which chains have no room for all of them.

    `taken` is the number of draws that each chain has already; `most` is the limit. All
    draws are recorded if the first result is `None`; else it is `bool[chain, draw]`.
    """
    shape = (len(taken), draws)
    if keep is not None:
        check_keep(keep, (draws,), shape)
        keep = np.broadcast_to(keep, shape)
    if most is None:
        return keep, np.zeros(len(taken), bool)
    wanted = taken + counts_of(keep, draws)
    full = wanted > most
    if not full.any():
        return keep, full
    keep = np.ones(shape, bool) if keep is None else keep
    return keep & (keep.cumsum(1) <= (most - taken)[:, None]), full


def fitting(keep: np.ndarray | None, taken: np.ndarray, draws: int, most: int) -> int:
    """The number of draws of a block before the first one that has no room."""
    kept, full = kept_of(keep, taken, draws, most)
    if kept is None or not full.any():
        return draws
    keep = np.ones(draws, bool) if keep is None else keep
    refused = np.broadcast_to(keep, kept.shape) & ~kept
    return int(refused.any(0).argmax())


def counts_of(kept: np.ndarray | None, draws: int) -> Any:
    """The number of draws that are kept of each chain."""
    return draws if kept is None else kept.sum(1)


def check_keep(keep: Any, one: tuple[int, ...], each: tuple[int, ...]) -> None:
    """Raise unless `keep` is bools, for all chains in one or for each of them."""
    if keep.dtype != np.bool_ or keep.shape not in (one, each):
        raise ValueError(
            f"`keep` is {keep.dtype}{list(keep.shape)}. Pass bool{list(one)}"
            + (f", or bool{list(each)} to tell chains apart." if one != each else ".")
        )


def on_host(keep: Any) -> np.ndarray | None:
    """Copy `keep` to the host; rows of other processes' chains stay `False`, unused."""
    if keep is None:
        return None
    if not isinstance(keep, jax.Array) or keep.is_fully_addressable:
        return np.asarray(keep)
    host = np.zeros(keep.shape, keep.dtype)
    for part in keep.addressable_shards:
        host[part.index] = np.asarray(part.data)
    return host
