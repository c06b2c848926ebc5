"""A training run that is killed again and again; run in a child of the zygote."""

import functools as ft
import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

import eqx_ckpt

from . import races


STEPS = 600
EVERY = 3  # steps between two saves
LONGEST = 20  # steps until a kill, so that thirty of them come before the end
_OPTIMISER = optax.adam(1e-2)


def _init() -> dict[str, Any]:
    model = eqx.nn.MLP(4, 2, 16, 1, key=jax.random.key(0))
    opt_state = _OPTIMISER.init(eqx.filter(model, eqx.is_array))
    return {"model": model, "opt_state": opt_state, "step": 0}


@eqx.filter_jit
def _update(model: Any, opt_state: Any, x: Any, y: Any) -> Any:
    def loss(model: Any) -> jax.Array:
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    updates, opt_state = _OPTIMISER.update(eqx.filter_grad(loss)(model), opt_state)
    return eqx.apply_updates(model, updates), opt_state


def _train(directory: str, out: int) -> None:
    """Train to the end, from where the run is; write what happens, line by line."""
    inputs = np.random.default_rng(0).standard_normal((STEPS, 8, 4), np.float32)
    manager = None
    if directory:
        keep = eqx_ckpt.keep_last(2)
        manager = eqx_ckpt.CheckpointManager(directory, keep=keep)
    if manager is None or manager.latest() is None:
        state = _init()
    else:
        state = manager.restore(eqx.filter_eval_shape(_init))
        _tell(out, "resumed", state["step"])
    for step in range(state["step"] + 1, STEPS + 1):
        x = inputs[step - 1]
        model, opt_state = _update(state["model"], state["opt_state"], x, x[:, :2] ** 2)
        state = {"model": model, "opt_state": opt_state, "step": step}
        _tell(out, "step", step)
        if manager is not None and step % EVERY == 0:
            saving = manager.save(step, state)
            saving.add_done_callback(ft.partial(_tell_of_save, out, step))
    if manager is not None:
        manager.close()
    _tell(out, "end", _digest(state))


def _tell(out: int, what: str, value: int | str) -> None:
    os.write(out, f"{what} {value}\n".encode())


def _tell_of_save(out: int, step: int, saving: Future[None]) -> None:
    _tell(out, "failed" if saving.exception() else "saved", step)


def _digest(state: Any) -> str:
    digest = hashlib.sha256()
    for path, leaf in jtu.tree_leaves_with_path(eqx.filter(state, eqx.is_array_like)):
        array = np.asarray(leaf)
        digest.update(f"{jtu.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


class Life(NamedTuple):
    """What a process told before it ended."""

    resumed: int  # 0: it began anew, or died before
    steps: int  # how many it has made
    saved: int  # the newest that was acknowledged
    end: str  # the digest of the final state, if it came so far


def uninterrupted() -> str:
    """The end of a run that saves nothing."""
    return _Process("").live().end


def interrupted(directory: str, kills: int, seed: int) -> list[Life]:
    """The lives of a run that is killed that many times, and then comes to its end."""
    choices = random.Random(seed)
    lives: list[Life] = []
    for n in range(kills):
        # One in five dies before its first step: in the clean-up, or the restore.
        steps = choices.randint(1, LONGEST) if n % 5 else 0
        delay = choices.uniform(0, 0.01 if steps else 0.3)
        lives.append(_Process(directory).live(steps, delay))
    return [*lives, _Process(directory).live()]


class _Process:
    """One process of the run."""

    def __init__(self, directory: str) -> None:
        reading, out = os.pipe()

        def train() -> int:
            _train(directory, out)
            return 0

        self._pid = races.fork(train)
        os.close(out)
        self._lines = os.fdopen(reading)

    def live(self, steps: int | None = None, delay: float = 0) -> Life:
        """Let it make so many steps, or all, and kill it a moment later."""
        events = list(self._until(steps)) if steps != 0 else []
        if steps is not None:
            time.sleep(delay)
            os.kill(self._pid, signal.SIGKILL)
        events += self._until(None)
        self._lines.close()
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        assert status == (0 if steps is None else -signal.SIGKILL), f"{status}"
        values = dict(events)
        assert "failed" not in values
        return Life(
            resumed=int(values.get("resumed", 0)),
            steps=sum(what == "step" for what, _ in events),
            saved=int(values.get("saved", 0)),
            end=values.get("end", ""),
        )

    def _until(self, steps: int | None) -> Iterator[tuple[str, str]]:
        """What it tells, until it has told of so many steps."""
        told = 0
        for line in self._lines:
            what, value = line.split()
            yield what, value
            told += what == "step"
            if told == steps:
                return
