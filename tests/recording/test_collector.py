"""Samples of compiled programs, given to a function."""

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqx_ckpt
from eqx_ckpt.recording import Collector, Recording


LIKE = {"n": jnp.int32(0), "key": jr.key(0)}


def loop(recorder, first):
    def body(i, recorder):
        return recorder.save({"n": first + i, "key": jr.key(i)}, keep=i % 2 == 0)

    return jax.lax.fori_loop(0, 10, body, recorder)


def test_a_function_gets_the_draws_of_each_chain_in_order():
    found = {0: [], 1: []}

    def collect(chain, samples):
        assert samples["key"].shape == (len(samples["n"]), 2)
        found[chain] += samples["n"].tolist()

    run = jax.jit(jax.vmap(lambda r, first: loop(r, first).flush()))
    with Collector(LIKE, collect, chains=2) as collector:
        run(collector.recorder(block=3), jnp.array([0, 100]))
    assert found == {0: [0, 2, 4, 6, 8], 1: [100, 102, 104, 106, 108]}


def collect_until(limit, program):
    count = []

    def collect(chain, samples):
        count.append(1)
        if len(count) >= limit:
            raise KeyError(limit)

    with Collector(LIKE, collect) as collector:
        assert program(collector.recorder(block=1)).failed == (limit < 5)
    return len(count)


def test_what_a_function_raises():
    run = jax.jit(lambda recorder: loop(recorder, 0))
    assert collect_until(9, run) == 5
    with pytest.raises(KeyError, match="2"):
        collect_until(2, run)


def test_the_end_names_flush():
    with (
        pytest.raises(eqx_ckpt.CheckpointError, match="not collected.*flush"),
        Collector(LIKE, lambda chain, samples: None) as collector,
    ):
        loop(collector.recorder(block=3), 0)


@pytest.mark.parametrize("kind", [Collector, Recording])
def test_what_a_block_raises_comes_first(tmp_path, kind):
    begun = kind(LIKE, print) if kind is Collector else kind(tmp_path / "r", LIKE)
    with pytest.raises(ZeroDivisionError) as raised, begun as it:  # noqa: PT012
        loop(it.recorder(block=3), 0)
        raise ZeroDivisionError
    [note] = raised.value.__notes__
    assert note.startswith(f"Besides, the {kind.__name__.lower()} failed: CheckpointE")


def test_what_it_refuses():
    with pytest.raises(eqx_ckpt.CheckpointError, match="no leaves"):
        Collector({}, print)
    with pytest.raises(ValueError, match="`chains` is 0"):
        Collector(LIKE, print, chains=0)
