"""Children forked while something goes on; each function runs in a child of the zygote.

Each returns the exit statuses of the children that it forks, and what came after.
"""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import eqx_ckpt
from support import uploads


TREE = {"x": np.arange(4.0)}
REFUSED, FAILED = 7, 8
_LONG = 60  # seconds; SIGALRM ends what hangs


class Pause:
    """To call from a thread, which then waits for `end`."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> None:
        self.reached.set()
        self.over.wait()


def _status(act: Callable[[], Any]) -> int:
    """The exit status of a child that is forked to do something."""
    pid = os.fork()
    if pid == 0:
        status = FAILED
        try:
            signal.alarm(_LONG)
            act()
            status = 0
        except eqx_ckpt.CheckpointError as e:
            status = REFUSED if "fork" in str(e) else FAILED
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _beside(go: Callable[[], Any], pause: Pause, act: Callable[[], Any]) -> int:
    """The status of a child that is forked while a thread pauses in a call."""
    thread = threading.Thread(target=go)
    thread.start()
    pause.reached.wait()
    status = _status(act)
    pause.over.set()
    thread.join()
    return status


def save(directory: str) -> tuple[int, list[int]]:
    """A thread is in `save` of the manager that the child uses."""
    pause = Pause()

    def spec(f: Any, leaf: Any) -> None:
        pause()
        eqx_ckpt.default_serialise_filter_spec(f, leaf)

    manager = eqx_ckpt.CheckpointManager(directory)
    status = _beside(
        lambda: manager.save(1, TREE, spec),
        pause,
        lambda: manager.save(2, TREE).result(),
    )
    manager.close()
    return status, manager.steps()


def ask(directory: str) -> tuple[int, int]:
    """The child asks how a save ends, during that and after it."""
    pause = Pause()
    saving = eqx_ckpt.tree_serialise_leaves_async(directory, TREE, progress=pause)
    pause.reached.wait()
    during = _status(saving.result)
    pause.over.set()
    saving.result()
    return during, _status(saving.result)


class _Slow(np.ndarray):
    """Numbers of rows, at whose use a thread pauses."""

    pause: Callable[[], None]

    def __getitem__(self, key: Any) -> Any:
        type(self).pause()
        return super().__getitem__(key)


def iterate(directory: str) -> tuple[int, int]:
    """The child reads on where its parent is."""
    eqx_ckpt.tree_serialise_leaves(directory, {"x": TREE, "y": TREE})
    leaves = eqx_ckpt.inspect.iter_leaves(directory)
    next(leaves)
    status = _status(lambda: [*leaves])
    return status, len([*leaves])


def take(directory: str) -> tuple[int, list[float]]:
    """A thread takes rows of the source from which the child takes some."""
    eqx_ckpt.tree_serialise_leaves(directory, TREE)
    source = eqx_ckpt.data.StoredDataSource(directory)
    reader = source._reader
    rows, _Slow.pause = np.arange(2), Pause()
    slow = rows.view(_Slow)
    status = _beside(lambda: reader.take(slow), _Slow.pause, lambda: reader.take(rows))
    return status, reader.take(rows)["x"].tolist()


def fetch() -> tuple[int, list[float]]:
    """The child takes batches that a thread of its parent fetches ahead."""
    source = eqx_ckpt.data.ArrayDataSource(x=np.arange(8.0))
    loader = eqx_ckpt.data.Loader(source, 1, order="sequential")
    batches = loader.iterate(loader.start())
    found = [next(batches)]
    status = _status(lambda: [next(batches) for _ in range(1000)])
    found.append(next(batches))
    return status, [batch["x"].item() for _, batch in found]


def record(directory: str) -> tuple[list[int], Any]:
    """The child uses the recording of its parent."""
    recording = eqx_ckpt.recording.Recording(directory, TREE)
    recording.append(TREE)
    recording.commit(TREE)
    recording.append(TREE)
    acts = (lambda: recording.append(TREE), recording.commit, recording.close)
    statuses = [_status(act) for act in acts]
    recording.commit(TREE)
    recording.close()
    return statuses, eqx_ckpt.recording.Samples(directory).committed


def upload(directory: str, where: str) -> tuple[int, list[int]]:
    """The child uses the manager while a thread of its parent uploads, and ends."""
    pause = Pause()

    def calls(*args: Any) -> Any:
        pause()
        return True if where == "when" else [*args[0]]

    mirror = eqx_ckpt.Mirror(f"{directory}/there", **{where: calls})
    manager = eqx_ckpt.CheckpointManager(f"{directory}/run", mirror=mirror)

    def act() -> None:
        manager.save(2, TREE).result()
        assert manager.uploads() == {}
        manager.close()
        uploads._finish()  # As the interpreter does at its end.

    status = _beside(lambda: manager.save(1, TREE), pause, act)
    manager.close()
    return status, manager.mirrored()
