"""A sampler of NumPy, whose state and samples are those of its steps alone."""

from typing import Any

import numpy as np

import eqx_ckpt


CHAINS = 2
BLOCK = 3
LIKE = {"theta": np.zeros(2), "inner": {"n": np.int32(0)}}
STATE = {"step": 0, "x": np.zeros((CHAINS, 2))}


def start() -> dict[str, Any]:
    return {"step": 0, "x": np.ones((CHAINS, 2))}


def block(state: dict[str, Any]) -> tuple[dict[str, Any], Any, np.ndarray]:
    """The next state, samples of all chains, and which of them are kept."""
    xs, step = [state["x"]], state["step"]
    for i in range(BLOCK):
        xs.append(np.sin(xs[-1] * 3 + np.arange(CHAINS)[:, None] + step + i))
    steps = step + np.arange(BLOCK)
    samples = {
        "theta": np.stack(xs[1:], axis=1),
        "inner": {"n": np.tile(steps.astype(np.int32), (CHAINS, 1))},
    }
    keep = (steps + np.arange(CHAINS)[:, None]) % 5 != 0
    return {"step": step + BLOCK, "x": xs[-1]}, samples, keep


def reference(blocks: int) -> list[dict[str, np.ndarray]]:
    """What each chain records in so many blocks."""
    state, found = start(), []
    for _ in range(blocks):
        state, samples, keep = block(state)
        found.append((samples["theta"], samples["inner"]["n"], keep))
    theta, n, keep = (
        np.concatenate(parts, axis=1) for parts in zip(*found, strict=True)
    )
    return [{"theta": theta[c][keep[c]], "n": n[c][keep[c]]} for c in range(CHAINS)]


def sample(path: str, blocks: int, commit_every: int = 1) -> dict[str, Any]:
    """Start, or go on, until so many blocks are done; returns the last state."""
    with eqx_ckpt.recording.Recording(
        path, LIKE, chains=CHAINS, chunk_bytes=64
    ) as recording:
        state = start()
        if recording.committed is not None:
            state = recording.resume(STATE)
        while state["step"] < blocks * BLOCK:
            state, samples, keep = block(state)
            recording.extend(samples, keep)
            if state["step"] // BLOCK % commit_every == 0:
                recording.commit(state)
    return state


def recorded(path: str) -> list[dict[str, np.ndarray]]:
    """What each chain has recorded; all of it is verified."""
    samples = eqx_ckpt.recording.Samples(path)
    samples.verify()
    found = [samples.read(chain=chain) for chain in range(CHAINS)]
    return [{"theta": tree["theta"], "n": tree["inner"]["n"]} for tree in found]


def safe(path: str) -> int:
    """How many blocks were committed by a process that has died."""
    try:
        samples = eqx_ckpt.recording.Samples(path)
    except eqx_ckpt.CheckpointNotFoundError:
        return 0
    if samples.committed is None:
        return 0
    found = recorded(path)
    for blocks in range(1, 100):
        expected = reference(blocks)
        if len(expected[0]["n"]) == len(found[0]["n"]):
            for one, other in zip(found, expected, strict=True):
                assert np.array_equal(one["theta"], other["theta"])
                assert np.array_equal(one["n"], other["n"])
            return blocks
    raise AssertionError("These are the samples of no commit.")
