"""Removing what dead saves have left, on request and beside the saves of a run."""

import atexit
import os
import threading

from .._storage.calls.threads import is_ending, start
from .._storage.locate import locate
from .._types import check_flag, PathLike
from .run_steps import Run


# Seconds that others wait for a sweep.
PATIENCE = 10.0


_running: "set[RunSweeps]" = set()


class RunSweeps:
    """A thread that removes the remains of dead attempts, one sweep at a time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin a sweep, unless one is running, or there can be nothing new."""
        is_running = self._thread is not None and self._thread.is_alive()
        if is_running or not self._run.stored.only_time_tells or is_ending():
            return
        name = f"eqx_ckpt sweeps {self._run.directory}"
        # A daemon, because the interpreter would wait for another thread before `_end`.
        thread = threading.Thread(target=self._sweep, name=name, daemon=True)
        if start(thread):
            self._thread = thread

    def _sweep(self) -> None:
        _running.add(self)
        try:
            self._run.clean_up()
        finally:
            _running.discard(self)

    def wait(self) -> None:
        """Wait for a sweep, for some time at most."""
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def end(self) -> None:
        """Stop a sweep; wait for a request that was sent, for some time at most."""
        self._run.stored.end_sweeps()
        self.wait()


@atexit.register
def _end() -> None:
    for sweeps in list(_running):
        sweeps.end()


# A forked child does not have the parent's threads.
os.register_at_fork(after_in_child=_running.clear)


def garbage_collect(
    directory: PathLike, *, dry_run: bool = False
) -> dict[str, int | None]:
    """Remove what saves that died have left in a run, as a new manager does.

    A save that lives is never touched, of whatever process and machine. In an object
    store, this watches each of them for ten minutes, unless there is none.

    **Arguments:**

    - `directory`: of a run, or any directory with checkpoints; or the place of a run in
        an object store.
    - `dry_run`: change nothing, and say what is there. In a store, a save that is going
        on is listed then too, as only time tells whether it lives.

    **Returns:**

    What was removed: by path, its bytes, without those of files that a checkpoint
    shares. In a store, they are `None`.

    **Raises:**

    - `OSError`: the file system or the store fails.

    !!! example

        ```python
        import eqx_ckpt

        for path, nbytes in eqx_ckpt.inspect.garbage_collect("runs/a").items():
            print(path, nbytes)
        assert eqx_ckpt.inspect.garbage_collect("runs/a", dry_run=True) == {}
        ```
    """
    check_flag("dry_run", dry_run)
    steps = locate(directory).steps()
    before = steps.orphans()
    if dry_run:
        return before
    steps.sweep_all()
    left = steps.orphans()
    return {path: nbytes for path, nbytes in before.items() if path not in left}
