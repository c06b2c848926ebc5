"""Children that save and look, and die on demand: `Child`, and what runs in one.

They are forked from a process that has imported the libraries and used none of them, so
that each costs a fork and not an import of JAX.
"""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.faults import shim

from .peers import Arrays, PEERS, Run


OTHER_VALUES = "other values"
DIED = "the process died"

# A child that takes longer hangs.
_SECONDS = 60
_PROCESSES = multiprocessing.get_context("forkserver")
_IMPORTED = (
    __name__,
    "eqx_ckpt",
    "flax.training.checkpoints",
    "orbax.checkpoint",
    "safetensors.flax",
)


class Job(NamedTuple):
    """Who saves where, how many steps it keeps, and how large a tree is."""

    peer: str
    directory: Path
    keep: int = 2
    mib: float = 0.5

    def open(self) -> Run:
        return PEERS[self.peer](self.directory, self.keep)


class ChildError(Exception):
    """A child raised, hung or died."""


class Child:
    """A function of this module in a fresh process, dead at the end of `with`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe, self._theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(
            target=_run, args=(self._theirs, function, *args), daemon=True
        )

    def __enter__(self) -> "Child":
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()

    def hear(self) -> Any:
        """The next thing that the child has said; None if it is dead."""
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    def go(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send("go")

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def result(self) -> Any:
        """What the function returns, or raise what it raised."""
        while isinstance(said := self.hear(), str):
            pass
        value, error = said or (None, DIED)
        self._process.join()
        if error:
            raise ChildError(error)
        return value

    def saved(self) -> int:
        """Wait for the end, whatever it is: how many more saves were acknowledged."""
        count = 0
        while isinstance(said := self.hear(), str):
            count += said == "saved"
        return count


def call(function: Callable[..., Any], *args: Any) -> Any:
    with Child(function, *args) as child:
        return child.result()


def prepare(directory: Path) -> None:
    """Start the process that forks the children, under the fault shim if there is one.

    The shim is built in `directory`, and sleeps until a child arms it.
    """
    _PROCESSES.set_forkserver_preload(list(_IMPORTED))
    library = "" if shim.missing() else str(shim.build(directory))
    environment = {"JAX_PLATFORMS": "cpu", "LD_PRELOAD": library}
    with _variables(environment), _silence():
        forkserver.ensure_running()
        call(_nothing)


@contextlib.contextmanager
def _variables(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What processes inherit as their standard error leads nowhere."""
    shown, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(shown, 2)
        os.close(shown)
        os.close(nowhere)


def _run(talk: Connection, function: Callable[..., Any], *args: Any) -> None:
    """The child's own side: the last that it says is its value, or its error."""
    signal.alarm(_SECONDS)
    try:
        talk.send((function(talk, *args), ""))
    except Exception as e:
        talk.send((None, _words(e)))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _nothing(talk: Connection) -> None:
    pass


def train(
    talk: Connection, job: Job, steps: list[int], deadly: int | None = None
) -> int:
    """Save some steps, and say "saving" before each and "saved" after it.

    The process dies before it deletes the `deadly`th name while it saves the last of
    the steps. With 0 it lives, and the number of the deleted names is returned.
    """
    with contextlib.closing(job.open()) as run:
        for step in steps:
            arrays = tree(step, job.mib)
            if deadly is not None and step == steps[-1]:
                fault = shim.Fault(str(job.directory), deadly, kinds=("unlink",))
                shim.arm(fault, -1)
            talk.send("saving")
            run.save(step, arrays)
            talk.send("saved")
    return 0 if deadly is None else shim.disarm()


def race(talk: Connection, job: Job, seed: int) -> None:
    """Be ready, and when the parent says so, open the directory and save step 1."""
    arrays = tree(seed, job.mib)
    talk.send("ready")
    talk.recv()
    with contextlib.closing(job.open()) as run:
        run.save(1, arrays)
        talk.send("saved")


def look(talk: Connection, job: Job) -> dict[int, int | str]:
    """Every listed step, with the seed of the tree it restores to, or what is wrong."""
    with contextlib.closing(job.open()) as run:
        return {step: _restored(run, step, job.mib) for step in run.steps()}


def _restored(run: Run, step: int, mib: float) -> int | str:
    like = {name: 0 * array for name, array in tree(_SEEDS[0], mib).items()}
    try:
        restored = run.restore(step, like)
    except Exception as e:
        return _words(e)
    return _seed(restored, mib)


# There is no other, so that a changed one is not taken for another tree.
_SEEDS = range(1, 10)


def _seed(restored: Arrays, mib: float) -> int | str:
    """The seed of which this is the tree, bit for bit."""
    found = _bits(restored)
    for seed in _SEEDS:
        if found.get("seed") == _bits({"": np.int32(seed)})[""]:
            return seed if found == _bits(tree(seed, mib)) else OTHER_VALUES
    return OTHER_VALUES


def _bits(arrays: Arrays) -> dict[str, Any]:
    """All that is to be the same."""
    found = {name: np.asarray(array) for name, array in arrays.items()}
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in found.items()}


def tree(seed: int, mib: float) -> Arrays:
    """Eight arrays of noise, `mib` MiB in all, and the seed that they are made from."""
    import jax

    random = np.random.default_rng(seed)
    noise = [random.random(int(mib * 2**15), np.float32) for _ in range(8)]
    arrays = {f"array{i}": array for i, array in enumerate(noise)}
    return jax.block_until_ready(jax.device_put(arrays | {"seed": np.int32(seed)}))
