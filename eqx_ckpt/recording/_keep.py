"""Which draws of a block are taken."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def kept_of(
    keep: Any, taken: Sequence[int], draws: int, most: int | None
) -> tuple[list[Any], set[int]]:
    """Which draws of each chain are taken, and the chains that get too many.

    `taken` says how many each chain has, and `most` how many it may have.
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


def count(some: Any, draws: int) -> int:
    return len(range(draws)[some]) if isinstance(some, slice) else len(some)


def _masks(keep: Any, chains: int, draws: int) -> list[Any]:
    """For each chain which draws to keep, or `None` for all."""
    if keep is None:
        return [None] * chains
    mask = _on_host(keep)
    if mask.dtype != np.bool_ or mask.shape not in ((draws,), (chains, draws)):
        raise ValueError(
            f"`keep` is {mask.dtype}{list(mask.shape)}. Pass bool[{draws}], or "
            f"bool[{chains}, {draws}] with a row for each chain."
        )
    return list(np.broadcast_to(mask, (chains, draws)))


def _on_host(keep: Any) -> np.ndarray:
    """What this process has of it; that of chains of other processes is not used."""
    if not isinstance(keep, jax.Array) or keep.is_fully_addressable:
        return np.asarray(keep)
    host = np.zeros(keep.shape, keep.dtype)
    for part in keep.addressable_shards:
        host[part.index] = np.asarray(part.data)
    return host
