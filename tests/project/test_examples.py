"""The examples: the same code on the same data, here and there in fewer steps."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_ckpt
from examples import demo, digits
from examples.evaluate import evaluate
from examples.language import init
from examples.sampling import posterior_means, reference_means, sample
from examples.sharded import make_like, make_mesh, train as train_sharded
from examples.train import log, train
from examples.transfer import OddOrEven, restore_encoder, transfer
from helpers import assert_same, keep_compiled


STEPS, SAVE_EVERY, KILLED_AFTER = 60, 10, 20
LAST = f"{STEPS:06d}"
LENGTH = ("--steps", STEPS, "--save-every", SAVE_EVERY)


@pytest.fixture(scope="module", autouse=True)
def compiles_once():
    """These tests take longer to compile than to compute."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in keep_compiled("examples").items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("examples") / "run"
    # Not in this process: with its eight devices, sums may be rounded otherwise.
    demo.python("train", run, *LENGTH)
    return run


def same_leaves(a, b):
    # Two `State`s differ in their markers, which name the model's class.
    return eqx.tree_equal(jax.tree.leaves(a), jax.tree.leaves(b))


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(run, tmp_path, capsys):
    killed = tmp_path / "killed"
    demo.kill_in_the_middle("train", killed, *LENGTH, after=KILLED_AFTER)
    lines = demo.python("train", killed, *LENGTH)
    assert re.fullmatch("goes on from step (20|30|40|50)", lines[0])
    demo.compare_runs(run, killed)
    assert capsys.readouterr().out.count("True: ") == 4
    assert 0 < demo.steps_taken(killed) - demo.steps_taken(run) < STEPS - KILLED_AFTER
    assert not list(killed.glob(".*"))


@pytest.mark.once
def test_losses_that_differ_are_seen(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    log(other / "losses.jsonl", 7, 0.5)
    assert demo.read_losses(other) != demo.read_losses(run)
    with pytest.raises(SystemExit, match="all its losses are the same"):
        demo.compare_runs(run, other)


@pytest.mark.slow
def test_sigterm_saves_the_last_step(tmp_path):
    seldom = ("--steps", 10**6, "--save-every", 10**6)
    process = demo.start("train", tmp_path, *seldom)
    # The second step is taken after the first has asked for SIGTERM.
    while demo.steps_taken(tmp_path) < 2 and process.poll() is None:
        time.sleep(0.001)
    process.terminate()
    demo.show_output(process)
    assert process.returncode == 0
    last = demo.steps_taken(tmp_path)
    assert eqx_ckpt.CheckpointManager(tmp_path).steps() == [last]


def test_a_run_that_is_done_stays_as_it_is(run, capsys):
    before = demo.read_files(run)
    train(run, STEPS, SAVE_EVERY)
    assert capsys.readouterr().out == f"goes on from step {STEPS}\n"
    assert demo.read_files(run) == before


def test_evaluation_does_not_need_the_optimiser(run, tmp_path):
    checkpoint = shutil.copytree(run / LAST, tmp_path / LAST)
    shutil.rmtree(checkpoint / "opt_state")
    accuracy = eqx_ckpt.inspect.read_manifest(checkpoint).metadata["accuracy"]
    assert evaluate(checkpoint) == pytest.approx(accuracy, abs=1 / 360)


def test_the_encoder_moves_to_another_model(run):
    loader = digits.load(*digits.load_data()[0])
    skeleton = eqx.filter_eval_shape(digits.init, jax.random.key(0), loader)
    saved = eqx_ckpt.tree_deserialise_leaves(run / LAST, skeleton)
    training = digits.init(jax.random.key(1), loader, OddOrEven)
    restored = restore_encoder(run / LAST, training)
    assert same_leaves(restored["model"].encoder, saved["model"].encoder)
    assert same_leaves(restored["state"], saved["state"])
    assert same_leaves(restored["model"].head, training["model"].head)
    assert not same_leaves(restored["model"].encoder, training["model"].encoder)


def test_the_other_model_trains(run, capsys):
    transfer(run / LAST, steps=2, few=64)
    random, restored = capsys.readouterr().out.splitlines()
    assert random.startswith("random encoder:")
    assert restored.startswith("restored encoder:")


def test_the_demo_shows_the_checkpoint(run, capsys):
    demo.show_checkpoint(run / LAST)
    out = capsys.readouterr().out
    assert "conv2/" in out
    assert "float32[32, 16, 3, 3]" in out


def test_the_demo_ends_at_what_is_not_true():
    with pytest.raises(SystemExit, match="This should be true, and is not: 2 < 1."):
        demo.check("2 < 1", 2 < 1)


def sharded(run, *arguments):
    """Runs `examples.sharded`, and ends all of its processes if they take too long."""
    command = [sys.executable, "-m", "examples.sharded", run, *arguments]
    with subprocess.Popen(
        list(map(str, command)),
        cwd=demo.project,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed = process.communicate(timeout=300)[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0
    assert printed.count("the same to the bit: True") == 2, printed
    return printed


def test_sampling_finds_the_posterior(tmp_path, capsys):
    sample(tmp_path, draws=500, commit_every=250)
    sample(tmp_path, draws=1000, commit_every=250)
    assert capsys.readouterr().out == "goes on from draw 500\n"
    assert demo.drawn(tmp_path) == 1000
    means = posterior_means(tmp_path, warmup=100)
    np.testing.assert_allclose(means, reference_means(), atol=0.05)


@pytest.mark.slow
def test_sampling_goes_on_to_the_same_bits(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
    demo.sample(tmp_path / "a", tmp_path / "b", "--draws", 2000, "--commit-every", 250)
    assert capsys.readouterr().out.count("True: ") == 3


def losses(run):
    manager = eqx_ckpt.CheckpointManager(run)
    return {s: manager.read_manifest(s).metadata["loss"] for s in manager.steps()}


@pytest.mark.slow
def test_a_run_goes_on_in_two_processes_on_another_mesh(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    length = ("--steps", 8, "--save-every", 2)
    # This process has eight devices too, and has imported everything.
    train_sharded(whole, data=2, steps=8, save_every=2)
    shutil.copytree(whole / "000002", parts / "000002")
    shutil.copytree(whole / "000004", parts / "000004")
    printed = sharded(parts, "--data", 4, *length, "--processes", 2)
    assert "goes on from step 4\n" in printed
    found, expected = losses(parts), losses(whole)
    assert found.keys() == expected.keys() == {2, 4, 6, 8}
    # The sums of another mesh are rounded otherwise.
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-3)

    skeleton = eqx.filter_eval_shape(init, jax.random.key(0))
    one = eqx_ckpt.tree_deserialise_leaves(parts / "000008", skeleton)
    for data in (1, 2, 4, 8):
        like = make_like(make_mesh(data))
        many = eqx_ckpt.tree_deserialise_leaves(parts / "000008", like)
        assert_same(many, one)
        query = many["model"].blocks[0].attention.query_proj.weight
        assert query.sharding.shard_shape(query.shape) == (64 * data // 8, 64)
