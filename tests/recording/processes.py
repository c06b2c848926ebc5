"""What the processes of a job do with one recording; see tests/faults/jobs.py."""

import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt

from . import draws


CHAINS, BLOCK = 4, 5
LIKE = {"x": np.zeros(2, np.float32), "n": np.int32(0)}


def reference(blocks: int) -> dict[str, Any]:
    n = np.arange(blocks * BLOCK, dtype=np.int32)
    n = n + 100 * np.arange(CHAINS, dtype=np.int32)[:, None]
    return {"x": np.float32(n[..., None] + np.array([0, 0.5])), "n": n}


def shared(data: Any) -> jax.Array:
    """Sharded over the chains, if they are an axis, on the devices of all processes."""
    mesh = Mesh(np.array(jax.devices()), ("chains",))
    place = NamedSharding(mesh, P("chains") if np.ndim(data) else P())
    data = np.asarray(data)
    return jax.make_array_from_callback(data.shape, place, lambda index: data[index])


def sample(
    path: str, blocks: int, dies_in: int = -1, timeout: float = 20.0
) -> tuple[int, str]:
    """Record so many blocks; process 1 is killed before one of the commits.

    Returns at which step it went on, and the error.
    """
    state: dict[str, Any] = {"step": 0, "x": shared(np.zeros(CHAINS, np.float32))}
    start = state
    options: dict[str, Any] = {
        "chains": CHAINS,
        "chunk_bytes": 16,
        "timeout": timeout,
    }
    try:
        with eqx_ckpt.recording.Recording(path, LIKE, **options) as recording:
            if recording.committed is not None:
                start = state = recording.resume(state)
            while state["step"] < blocks:
                step = state["step"]
                some = slice(step * BLOCK, (step + 1) * BLOCK)
                block = {k: v[:, some] for k, v in reference(blocks).items()}
                recording.extend(jax.tree.map(shared, block))
                if step == dies_in and jax.process_index() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                state = {"step": step + 1, "x": state["x"] + 1}
                recording.commit(state)
    except eqx_ckpt.CheckpointError as e:
        return start["step"], str(e)
    return start["step"], ""


def keep_and_end(path: str) -> None:
    """Without a state: the end commits, for all processes."""
    keep = np.arange(BLOCK) % 2 == np.arange(CHAINS)[:, None] % 2
    with eqx_ckpt.recording.Recording(path, LIKE, chains=CHAINS) as recording:
        recording.extend(jax.tree.map(shared, reference(1)), shared(keep))


def many(path: str, start: int, stop: int) -> None:
    """Record blocks of 20 chains in bands of two, and keep other draws of each."""
    like = {"n": np.int32(0), "key": jax.random.key(0)}
    options: dict[str, Any] = {"chains": 20, "chunk_bytes": 8}
    with eqx_ckpt.recording.Recording(path, like, **options) as recording:
        for i in range(start, stop):
            n, keep = many_of(i)
            keys = jax.jit(jax.vmap(jax.vmap(jax.random.key)))(shared(n))
            recording.extend({"n": shared(n), "key": keys}, shared(keep))
            recording.commit()


def many_of(block: int) -> tuple[np.ndarray, np.ndarray]:
    """The draws of a block, and which of them are kept."""
    chains = np.arange(20, dtype=np.int32)[:, None]
    draws = np.arange(BLOCK, dtype=np.int32) + block * BLOCK
    return draws + 1000 * chains, (draws + chains) % 4 > 0


def scan(path: str) -> None:
    def step(state: Any, _: None) -> Any:
        n = state
        x = jnp.stack([n, n + 0.5], axis=1).astype(jnp.float32)
        return n + 1, {"x": x, "n": n}

    n = shared(100 * np.arange(CHAINS, dtype=np.int32))
    like = {"x": jnp.zeros(2), "n": jnp.int32(0)}
    with eqx_ckpt.recording.Recording(path, like, chains=CHAINS) as recording:
        seconds = 1e-9  # Always due.
        eqx_ckpt.recording.record_scan(
            step,
            n,
            length=2 * BLOCK,
            recording=recording,
            block=BLOCK,
            commit_every_seconds=seconds,
        )


def local(path: str) -> None:
    """What is not global is that of the first process."""
    block = reference(1)
    block["n"] = block["n"] + np.int32(jax.process_index())
    with eqx_ckpt.recording.Recording(path, LIKE, chains=CHAINS) as recording:
        recording.extend(block)


def caught(path: str, which: str) -> str:
    """The error of what cannot be recorded together."""
    like, chains = LIKE, CHAINS
    if which == "like" and jax.process_index() == 1:
        like = {"x": np.zeros(3, np.float32), "n": np.int32(0)}
    try:
        with eqx_ckpt.recording.Recording(
            path, like, chains=chains, timeout=20.0
        ) as recording:
            if which == "recorder":
                recording.recorder()
            block = jax.tree.map(shared, reference(1))
            if which == "axis":
                place = NamedSharding(
                    Mesh(np.array(jax.devices()), ("d",)), P(None, "d")
                )
                data = np.zeros((CHAINS, 4, 2), np.float32)
                block = {
                    "x": jax.make_array_from_callback(
                        data.shape, place, lambda index: data[index]
                    ),
                    "n": np.zeros((CHAINS, 4), np.int32),
                }
            recording.extend(block)
            recording.commit()
    except eqx_ckpt.CheckpointError as e:
        return str(e)
    return ""


def perform(
    path: str,
    chains: int,
    operations: list[tuple[Any, ...]],
    log: str = "",
    timeout: float = 60.0,
) -> list[str]:
    """Open a recording, and do all of this; see test_model.py.

    Each operation that commits, and returns, adds a byte to the file `log`.

    **Returns:**

    What each operation has raised, or "".
    """
    errors: list[str] = []
    recording = eqx_ckpt.recording.Recording(
        path, draws.LIKE, chains=chains, chunk_bytes=48, timeout=timeout
    )
    for name, *args in operations:
        try:
            _perform(recording, name, *args)
        except eqx_ckpt.CheckpointError as e:
            errors.append(str(e))
        else:
            errors.append("")
            if log and name in ("commit", "scan", "close"):
                with open(log, "a") as file:
                    file.write(".")
    return errors


def _perform(recording: eqx_ckpt.recording.Recording, name: str, *args: Any) -> None:
    if name == "resume":
        (state,) = args
        found = recording.resume(jax.tree.map(lambda x: x * 0, state))
        jax.tree.map(np.testing.assert_array_equal, found, state)
    elif name == "extend":
        (block,) = args
        recording.extend(jax.tree.map(shared, block))
    elif name == "append":
        (sample,) = args
        recording.append(jax.tree.map(shared, sample))
    elif name == "commit":
        recording.commit(*args)
    elif name == "scan":
        first, count, options = args
        state = draws.begin_scan(first, recording.chains)
        state = jax.tree.map(shared, state)
        eqx_ckpt.recording.record_scan(
            draws.step, state, length=count, recording=recording, **options
        )
    elif name == "read":
        (block,) = args
        jax.tree.map(np.testing.assert_array_equal, recording.samples.read(), block)
    elif name == "close":
        recording.close()
    elif name == "die" and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
