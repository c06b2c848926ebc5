"""Saves and reads when the main thread has ended: in `atexit`, and in other threads."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest

import eqx_ckpt


PROGRAM = """
import atexit, sys, threading

import numpy as np

BIG = 60 * [np.ones(2**20, np.uint8)]  # more than is always allowed to be staged
WHEN, FOLDER = sys.argv[1:]


def work():
    import eqx_ckpt

    tree = {"jax": ARRAY, "w": np.arange(8.0), "big": BIG}
    save = eqx_ckpt.tree_serialise_leaves_async
    eqx_ckpt.tree_serialise_leaves(f"{FOLDER}/direct", tree)
    save(f"{FOLDER}/async", tree)
    save(f"{FOLDER}/small", tree, staging_bytes=1, compression="zstd")
    save(f"{FOLDER}/database", tree, layout="ocdbt")
    keep = eqx_ckpt.keep_last(1)
    with eqx_ckpt.CheckpointManager(f"{FOLDER}/closed", keep=keep) as manager:
        manager.save(1, {"step": 1})
        manager.save(2, {"step": 2})
    manager = eqx_ckpt.CheckpointManager(f"{FOLDER}/run", check_finite=True)
    if RUNNING is not None:
        RUNNING.save(2, {"step": 2})
    manager.save(3, {"step": 3})
    assert manager.restore({"step": 0}) == {"step": 3}
    for path in ("direct", "async", "small", "database"):
        assert eqx_ckpt.inspect.stats(f"{FOLDER}/{path}")["w"].mean == 3.5
    path = f"{FOLDER}/samples"
    with eqx_ckpt.recording.Recording(path, {"x": np.ones(3)}) as recording:
        recording.append({"x": np.ones(3)})
        recording.commit()
    with eqx_ckpt.CheckpointManager("memory://ending/run") as manager:
        manager.save(5, tree, metadata={"loss": 1.0})
        assert manager.best("loss") == 5
    print("all but the last")
    manager = eqx_ckpt.CheckpointManager(f"{FOLDER}/run", check_finite=True)
    manager.save(4, {"w": np.full(3, np.nan)})
    print("no error")


if WHEN == "before":
    atexit.register(work)
import jax.numpy as jnp

import eqx_ckpt

ARRAY, RUNNING = jnp.ones(7), None
if WHEN == "after":
    RUNNING = eqx_ckpt.CheckpointManager(f"{FOLDER}/run")
    RUNNING.save(1, {"step": 1})
    atexit.register(work)
if WHEN == "thread":
    main = threading.main_thread()
    threading.Thread(target=lambda: (main.join(), work())).start()
"""


@pytest.mark.parametrize("when", ["before", "after", "thread"])
def test_what_is_saved_then_is_there_or_raises(tmp_path, when):
    """No thread may start then, and nobody waits for one."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), when, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "all but the last\n", done.stderr
    assert "3 NaN, 0 infinite" in done.stderr
    for path in ("direct", "async", "small", "database", "closed/000002"):
        eqx_ckpt.inspect.verify(tmp_path / path)
    manager = eqx_ckpt.CheckpointManager(tmp_path / "run")
    assert manager.steps() == ([1, 2, 3] if when == "after" else [3])
    with eqx_ckpt.recording.Recording(
        tmp_path / "samples", {"x": np.ones(3)}
    ) as recording:
        assert recording.committed == 1
