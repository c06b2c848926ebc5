"""The record of recordings, version 1: what was recorded once is read for ever."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import eqx_ckpt
from helpers import assert_same


# Chains of six draws, and one of five, zstd; saved once and never saved again.
GOLDEN = Path(__file__).parents[1] / "data" / "v1-recording"


def test_the_golden_recording_is_read():
    samples = eqx_ckpt.recording.Samples(GOLDEN)
    samples.verify()
    assert samples.chains == 32
    assert list(samples.committed) == [6] * 31 + [5]
    assert samples.metadata == {"sampler": "golden"}
    for chain in range(32):
        draws = np.arange(5 if chain == 31 else 6, dtype=np.int32)
        read = samples.read(chain=chain)
        theta = draws.astype(np.float32) / (-2 if chain % 2 else 2)
        np.testing.assert_array_equal(read["theta"], np.stack([theta, theta], -1))
        np.testing.assert_array_equal(read["n"], 100 * chain + draws)
        assert_same(read["key"], jax.vmap(jax.random.key)(100 * chain + draws))


def test_the_state_of_the_golden_recording_restores():
    like = {"theta": jnp.zeros((2, 2)), "step": 0}
    state = eqx_ckpt.tree_deserialise_leaves(GOLDEN / "states" / "000002", like)
    assert_same(state, {"theta": jnp.full((2, 2), 3.0), "step": 6})
