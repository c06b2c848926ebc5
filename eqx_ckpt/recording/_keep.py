"""Select the draws of a block that are recorded."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def kept_of(
    keep: np.ndarray | None, taken: Sequence[int], draws: int, most: int | None
) -> tuple[list[Any], set[int]]:
    """Select the draws to record from each chain, and list the chains that are full.

    `taken` is the number of draws that each chain has already; `most` is the limit.
    """
    kept: list[Any] = []
    full: set[int] = set()
    for chain, mask in enumerate(_masks(keep, len(taken), draws)):
        some = slice(0, draws) if mask is None else np.flatnonzero(mask)
        if most is not None and taken[chain] + count(some, draws) > most:
            full.add(chain)
            left = int(max(0, most - taken[chain]))
            some = slice(0, left) if isinstance(some, slice) else some[:left]
        kept.append(some)
    return kept, full


def fitting(
    keep: np.ndarray | None, taken: Sequence[int], draws: int, most: int
) -> int:
    """The number of draws of a block before the first one that has no room."""
    fits = draws
    for chain, mask in enumerate(_masks(keep, len(taken), draws)):
        kept = np.arange(draws) if mask is None else np.flatnonzero(mask)
        left = max(0, most - taken[chain])
        if left < len(kept):
            fits = min(fits, int(kept[left]))
    return fits


def count(some: Any, draws: int) -> int:
    return len(range(draws)[some]) if isinstance(some, slice) else len(some)


def _masks(keep: np.ndarray | None, chains: int, draws: int) -> list[Any]:
    """The mask of each chain; `None` keeps all of its draws."""
    if keep is None:
        return [None] * chains
    check_keep(keep, (draws,), (chains, draws))
    return list(np.broadcast_to(keep, (chains, draws)))


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
