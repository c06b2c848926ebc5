"""Random changes of files, and what a source may answer to them."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

import eqx_ckpt


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Data with one to three random changes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(found) or 1)
        kind = rng.randrange(6)
        if kind == 0:
            found[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del found[at:]
        elif kind == 2:
            del found[at : at + rng.randrange(1, 9)]
        elif kind == 3:
            found[at:at] = bytes(
                rng.choices(b'\0\xff{}[]",:09x', k=rng.randrange(1, 9))
            )
        elif kind == 4:
            number = rng.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
            width = rng.choice((2, 4, 8))
            found[at : at + width] = (number % 256**width).to_bytes(width, "little")
        else:
            other = rng.randrange(len(found) or 1)
            found[at : at + 16] = found[other : other + 16]
    return bytes(found)


def check(open_source: Callable[[], eqx_ckpt.Source], place: Path) -> bool:
    """Open and read everything; return whether that was possible."""
    problem = ""
    try:
        source = open_source()
        for name, record, value in eqx_ckpt.leaves(source):
            assert np.shape(value) == record.data_shape, name
    except eqx_ckpt.CheckpointError as e:
        problem = str(e)
    assert not problem or str(place) in problem
    return not problem
