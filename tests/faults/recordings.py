"""A recording with a commit after each block, and what there is of one."""

import contextlib
import pathlib

import jax
import numpy as np

from eqx_ckpt import CheckpointNotFoundError
from eqx_ckpt.recording import Recording, Samples

from . import shim


BLOCK, BLOCKS = 5, 3
LIKE = {"x": jax.ShapeDtypeStruct((2,), np.float32)}


def draws(block: int) -> np.ndarray:
    first = BLOCK * block
    return np.arange(2 * first, 2 * (first + BLOCK), dtype=np.float32).reshape(-1, 2)


def record(path: str, *, has_states: bool, notes: bool = True) -> None:
    """Go on to the last block; note how many draws are there, and after each commit."""
    with Recording(path, LIKE) as recording:
        if notes:
            shim.note(f"{recording.committed or 0}")
        state = {"block": (recording.committed or 0) // BLOCK}
        if has_states and recording.committed is not None:
            # The end of a recording whose first state could not be saved commits, too.
            with contextlib.suppress(CheckpointNotFoundError):
                assert recording.resume({"block": 0}) == state
        for block in range(state["block"], BLOCKS):
            recording.extend({"x": draws(block)})
            recording.commit({"block": block + 1} if has_states else None)
            if notes:
                shim.note(f"{recording.committed}")


def record_again(path: str, *, has_states: bool) -> str:
    """Go on after an error, as if started again; return what it said."""
    try:
        record(path, has_states=has_states)
    except OSError as e:
        record(path, has_states=has_states)
        return str(e)
    return ""


def check(path: pathlib.Path, notes: list[str], *, has_states: bool) -> None:
    """The last commit is there, or the one that had begun; all can be recorded."""
    last = int(notes[-1]) if notes else 0
    try:
        there = Samples(path)
        committed, found = there.committed or 0, there.read()["x"]
    except CheckpointNotFoundError:
        committed, found = 0, np.zeros((0, 2), np.float32)
    assert committed in (last, last + BLOCK), (committed, notes)
    whole = np.concatenate([draws(block) for block in range(BLOCKS)])
    np.testing.assert_array_equal(found, whole[:committed])
    record(str(path), has_states=has_states, notes=False)
    np.testing.assert_array_equal(Samples(path).read()["x"], whole)
