"""The record of recordings, version 1: what was recorded once is read for ever."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import eqx_ckpt
from helpers import assert_same


# Two chains of six draws, zstd, saved once and never saved again.
GOLDEN = Path(__file__).parents[1] / "data" / "v1-recording"


def test_the_golden_recording_is_read():
    samples = eqx_ckpt.Recording.open(GOLDEN)
    samples.verify()
    assert (samples.chains, samples.committed) == (2, 6)
    assert samples.metadata == {"sampler": "golden"}
    draws = np.arange(6, dtype=np.int32)
    read = samples.read()
    theta = np.stack([draws, -draws]).astype(np.float32) / 2
    np.testing.assert_array_equal(read["theta"], np.stack([theta, theta], -1))
    np.testing.assert_array_equal(read["n"], np.stack([draws, 100 + draws]))
    for chain, first in enumerate((0, 100)):
        assert_same(read["key"][chain], jax.vmap(jax.random.key)(first + draws))


def test_the_state_of_the_golden_recording_restores():
    like = {"theta": jnp.zeros((2, 2)), "step": 0}
    state = eqx_ckpt.tree_deserialise_leaves(GOLDEN / "states" / "000002", like)
    assert_same(state, {"theta": jnp.full((2, 2), 3.0), "step": 6})
