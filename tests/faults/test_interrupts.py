"""Ctrl-C at any line of a call, as in a notebook, in which the process lives on.

The call ends, with `KeyboardInterrupt`. No thread is left, whatever is on the disk is
whole, and the same call works when it is made again.
"""

import contextlib
import gc
import linecache
import os
import signal
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from helpers import assert_same
from versions import thinned


PACKAGE = os.path.dirname(eqx_ckpt.__file__)
# Large enough for threads.
TREE = {f"w{i}": np.full((200, 300), i, np.float32) for i in range(4)} | {"n": 3}
ON_DEVICE = {name: jnp.asarray(value) for name, value in TREE.items()}
POINTS = 24


def is_with(frame):
    """Whether it is at a `with`, also when that ends, which locks do not survive."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return line.lstrip().startswith("with ")


class Interrupt:
    """Counts the lines that this thread runs of the package, and interrupts at one.

    A thread that starts counts too, because this one waits for it then. With
    `functions`, only their lines count.
    """

    def __init__(self, at, functions=()):
        self.at = at
        self.functions = functions
        self.count = 0
        self.starts = []
        self.start = threading.Thread.start

    def step(self):
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt

    def trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        counts = not self.functions or frame.f_code.co_qualname in self.functions
        if event == "line" and counts and not is_with(frame):
            self.step()
        return self.trace

    def started(self, thread):
        self.start(thread)
        if self.functions:
            return
        if threading.current_thread() is threading.main_thread():
            self.starts.append(self.count + 1)
            self.step()


def interrupted(call, at=-1, functions=()):
    """Make a call that is interrupted at a line; what it ran."""
    interrupt, before = Interrupt(at, functions), sys.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: interrupt.started(self))
        sys.settrace(interrupt.trace)
        try:
            call()
        finally:
            sys.settrace(before)
    return interrupt


@pytest.fixture
def patience():
    """An error, in place of a test that hangs."""

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, how in (("c", {}), ("db", {"layout": "ocdbt"})):
        eqx_ckpt.tree_serialise_leaves(name, TREE, **how)
    eqx_ckpt.tree_serialise_leaves("jax", ON_DEVICE)
    eqx_ckpt.tree_serialise_leaves("z", TREE, compression="zstd")
    with contextlib.suppress(Warning):
        eqx_ckpt.interop.to_safetensors("c", "m.safetensors")
    return tmp_path


def restore(path, like=TREE):
    assert_same(eqx_ckpt.tree_deserialise_leaves(path, like), like)


def save(**how):
    eqx_ckpt.tree_serialise_leaves("new", TREE, overwrite=True, **how)
    restore("new")


def steps():
    with eqx_ckpt.CheckpointManager("run", keep=eqx_ckpt.keep_last(2)) as manager:
        step = (manager.latest() or 0) + 1
        manager.save(step, TREE)
        assert_same(manager.restore(TREE), TREE)


def record():
    like = {"x": np.zeros(300)}
    # Each commit has a chunk more.
    with eqx_ckpt.recording.Recording("rec", like, chunk_bytes=12_000) as recording:
        if recording.committed is not None:
            recording.resume({"n": 0})
        recording.extend({"x": np.ones((5, 300))})
        recording.commit({"n": 1})
    eqx_ckpt.recording.Samples("rec").verify()


WAYS = {
    "restore": lambda: restore("c"),
    "restore onto a device": lambda: restore("jax", ON_DEVICE),
    "restore a database": lambda: restore("db"),
    "restore what is compressed": lambda: restore("z"),
    "read safetensors": lambda: eqx_ckpt.inspect.stats(
        eqx_ckpt.interop.open_safetensors("m.safetensors")
    ),
    "verify": lambda: eqx_ckpt.inspect.verify("c"),
    "save": save,
    "save a database": lambda: save(layout="ocdbt"),
    "save compressed": lambda: save(compression="zstd"),
    "copy": lambda: eqx_ckpt.copy("c", "copied", overwrite=True),
    "export": lambda: eqx_ckpt.interop.to_npz("c", "c.npz", overwrite=True),
    "manager": steps,
    "recording": record,
}


def extend():
    """Without a state, samples are committed also when the block is interrupted."""
    block = {"x": np.ones((5, 3))}
    with eqx_ckpt.recording.Recording("ext", {"x": np.zeros(3)}) as recording:
        before = recording.committed or 0
        with contextlib.suppress(KeyboardInterrupt):
            recording.extend(block)
        recording.extend(block)
    samples = eqx_ckpt.recording.Samples("ext")
    samples.verify()
    assert samples.committed in (before + 5, before + 10)


# Where work is handed to a thread, and where a name is given: each line counts.
EACH_LINE = {
    "save": (steps, ("save_in_background", "Saving.start")),
    "recording": (
        extend,
        ("Log.extend", "Log._queue", "Writer.put", "Writer.drain", "start"),
    ),
    "commit": (
        record,
        ("Log._commit", "Place.commit", "Place._commit", "DirectoryWriter.commit"),
    ),
    "end": (
        record,
        ("Log._end", "Log.abandon", "Writer.stop", "DirectoryWriter.release"),
    ),
    "collector": (
        lambda: restore("c"),
        ("_Collector.paused", "_Collector._end"),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", EACH_LINE)
def test_ctrl_c_at_each_line(made, patience, what):
    call, functions = EACH_LINE[what]
    call()
    for at in range(1, interrupted(call, functions=functions).count + 1):
        with contextlib.suppress(KeyboardInterrupt):
            interrupted(call, at, functions)
        call()
        assert gc.isenabled(), at


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", thinned(WAYS, 3))
def test_ctrl_c(made, patience, way):
    call = WAYS[way]
    call()
    ran = interrupted(call)
    for at in [*np.linspace(1, ran.count, POINTS, dtype=int).tolist(), *ran.starts]:
        with contextlib.suppress(KeyboardInterrupt):
            interrupted(call, at)
        for folder in (".", "run", "rec/states"):
            eqx_ckpt.inspect.garbage_collect(folder)
        # A lock may stay, which is empty, until the process ends.
        assert list(made.rglob(".*.tmp")) == [], at
        for path in ("new", "copied"):
            if os.path.exists(path):
                assert eqx_ckpt.inspect.verify(path)
        call()
        assert gc.isenabled(), at
    deadline = time.monotonic() + 60
    gc.collect()  # The frames of the interrupted calls.
    while ours := [t.name for t in threading.enumerate() if "_work" in t.name]:
        assert time.monotonic() < deadline, ours
        time.sleep(0.01)
