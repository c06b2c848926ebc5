"""A run, and commands that look at it."""

import errno
import json
import os

import jax
import jax.numpy as jnp
import pytest

import eqx_ckpt
from eqx_ckpt.__main__ import main


def state(step):
    tree = {"model": {"w": jnp.arange(6.0).reshape(2, 3) + step, "b": jnp.ones(3)}}
    return tree | {"step": step, "key": jax.random.key(0)}


@pytest.fixture
def run(tmp_path):
    with eqx_ckpt.CheckpointManager(tmp_path / "a run") as manager:
        for step in (1, 2, 3):
            metadata = {"loss": abs(2 - step) + 0.5, "note": "<b>\x1b[31m"}
            manager.save(step, state(step), metadata=metadata)
    return tmp_path / "a run"


@pytest.fixture
def ask(capsys):
    """Runs a command: its status, and what it prints."""

    def ask(*arguments):
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out + err

    return ask


@pytest.fixture
def data(ask):
    """Runs a command with `--json`: its status, and what that says."""

    def data(*arguments):
        status, text = ask(*arguments, "--json")
        return status, json.loads(text, parse_constant=pytest.fail)

    return data


@pytest.fixture
def refuse(monkeypatch):
    """Lets the system refuse to open what has this in its path."""
    system_open = os.open

    def refuse(part, code=errno.EACCES):
        def opened(path, *args, **kwargs):
            if part in os.fspath(path):
                raise OSError(code, os.strerror(code), path)
            return system_open(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", opened)

    return refuse


def dead_save(run, step):
    """What a save leaves when its process is killed: nobody holds its lock."""
    stem = run / f".{step:06d}.{step:032x}"
    stem.with_name(f"{stem.name}.lock").touch()
    folder = stem.with_name(f"{stem.name}.tmp")
    (folder / "w").mkdir(parents=True)
    (folder / "w/c.0").write_bytes(bytes(1000))
    return folder
