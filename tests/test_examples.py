"""The examples, shortened: the same code on the same data, in fewer steps."""

import shutil

import equinox as eqx
import jax
import pytest

import eqx_ckpt
from examples import demo, digits
from examples.evaluate import evaluate
from examples.transfer import OddOrEven, restore_encoder, transfer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("examples") / "run"
    # Not in this process: with its eight devices, sums may be rounded otherwise.
    demo.python("train", run, "--steps", 6, "--save-every", 3)
    return run


def same_leaves(a, b):
    # Two `State`s differ in their markers, which name the model's class.
    return eqx.tree_equal(jax.tree.leaves(a), jax.tree.leaves(b))


def test_a_new_process_trains_on_to_the_same_bits(run, tmp_path):
    resume = ("--resume", run / "000003")
    demo.python("train", tmp_path, "--steps", 6, "--save-every", 3, *resume)
    losses = demo.read_losses(run)
    assert demo.read_losses(tmp_path) == {step: losses[step] for step in "456"}
    resumed = eqx_ckpt.read_manifest(tmp_path / "000006")
    never_stopped = eqx_ckpt.read_manifest(run / "000006")
    assert resumed.leaves == never_stopped.leaves
    assert resumed.metadata == never_stopped.metadata


def test_evaluation_does_not_need_the_optimiser(run, tmp_path):
    checkpoint = shutil.copytree(run / "000006", tmp_path / "000006")
    shutil.rmtree(checkpoint / "opt_state")
    accuracy = eqx_ckpt.read_manifest(checkpoint).metadata["accuracy"]
    assert evaluate(checkpoint) == pytest.approx(accuracy, abs=1 / 360)


def test_the_encoder_moves_to_another_model(run):
    skeleton = eqx.filter_eval_shape(digits.init, jax.random.key(0))
    saved = eqx_ckpt.tree_deserialise_leaves(run / "000006", skeleton)
    training = digits.init(jax.random.key(1), OddOrEven)
    restored = restore_encoder(run / "000006", training)
    assert same_leaves(restored["model"].encoder, saved["model"].encoder)
    assert same_leaves(restored["state"], saved["state"])
    assert same_leaves(restored["model"].head, training["model"].head)
    assert not same_leaves(restored["model"].encoder, training["model"].encoder)


def test_the_other_model_trains(run, capsys):
    transfer(run / "000006", steps=2, few=64)
    random, restored = capsys.readouterr().out.splitlines()
    assert random.startswith("random encoder:")
    assert restored.startswith("restored encoder:")


def test_the_demo_shows_the_checkpoint(run, capsys):
    demo.show_checkpoint(run / "000006")
    out = capsys.readouterr().out
    assert "conv2/" in out
    assert "float32[32, 16, 3, 3]" in out


def test_the_demo_ends_at_what_is_not_true():
    with pytest.raises(SystemExit, match="This should be true, and is not: 2 < 1."):
        demo.check("2 < 1", 2 < 1)
