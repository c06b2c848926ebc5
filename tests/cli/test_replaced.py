"""A checkpoint that is replaced while a command, or anything else, reads it."""

import os
from pathlib import Path

import jax.numpy as jnp
import pytest

import eqx_ckpt


pytest.importorskip("typer")
OLD, NEW = 1.0, 2.0


def state(value):
    return {"a": jnp.full(3, value), "b": jnp.full(3, value)}


@pytest.fixture
def ckpt(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", state(OLD))
    return tmp_path / "c"


@pytest.fixture
def replaced(ckpt, monkeypatch):
    """Has it replaced, once, when somebody opens a chunk of it."""
    system_open = os.open
    done = []

    def opened(path, *args, **kwargs):
        text = os.fspath(path)
        if "c/a/c.0" in text and not done:
            done.append(path)
            eqx_ckpt.tree_serialise_leaves(ckpt, state(NEW), overwrite=True)
        return system_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", opened)
    return done


def test_commands_read_it_again(ckpt, replaced, tmp_path, ask, data):
    """All that they say is of one version, and nothing is damaged."""
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", state(NEW))
    calls = {
        "show": lambda: data("show", ckpt, "a")[1]["values"] == [NEW] * 3,
        "stats": lambda: {x["max"] for x in data("stats", ckpt)[1]["leaves"]} == {NEW},
        "verify": lambda: ask("verify", ckpt)[0] == 0,
        "diff a": lambda: ask("diff", ckpt, tmp_path / "new", "--values") == (0, ""),
        "diff b": lambda: ask("diff", tmp_path / "new", ckpt, "--values") == (0, ""),
        "both": lambda: ask("diff", ckpt, ckpt, "--values") == (0, ""),
    }
    for name, call in calls.items():
        eqx_ckpt.tree_serialise_leaves(ckpt, state(OLD), overwrite=True)
        replaced.clear()
        assert call(), name
        assert replaced, name


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("copy", ["copied"]),
        ("convert", ["x.safetensors"]),
        ("convert", ["x.npz"]),
        ("convert", ["x.msgpack"]),
        ("convert", ["orbax", "--to", "orbax"]),
        ("convert", ["again", "--to", "checkpoint"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_what_is_written_once_is_not_written(
    ckpt, replaced, tmp_path, ask, command, options
):
    """It says what happened, and asks for no other checkpoint."""
    if "orbax" in options:
        pytest.importorskip("orbax.checkpoint")
    target = tmp_path / "out" / options[0]
    status, text = ask(command, ckpt, target, *options[1:])
    assert status == 2
    assert "was replaced or removed while its leaves were read. Begin again." in text
    assert "damaged" not in text
    assert not target.exists()
    assert ask(command, ckpt, target, *options[1:])[0] == 0


def test_a_source_that_was_opened_before(ckpt, tmp_path):
    """It is not damaged: it is not there any more."""
    sources = [eqx_ckpt.interop.open_source(ckpt) for _ in range(3)]
    eqx_ckpt.tree_serialise_leaves(ckpt, state(NEW), overwrite=True)
    reads = [
        eqx_ckpt.inspect.stats,
        eqx_ckpt.inspect.verify,
        lambda source: eqx_ckpt.copy(source, tmp_path / "copied"),
        lambda source: [*eqx_ckpt.inspect.iter_leaves(source)],
        lambda source: eqx_ckpt.tree_deserialise_leaves(source, state(0.0)),
    ]
    for read in reads:
        with pytest.raises(eqx_ckpt.CheckpointError, match="was replaced") as error:
            read(sources[0])
        assert type(error.value) is eqx_ckpt.CheckpointError
    assert not Path(tmp_path / "copied").exists()
