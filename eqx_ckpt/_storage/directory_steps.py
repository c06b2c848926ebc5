"""The steps of a run in a directory; nothing is cached that could be stale."""

import contextlib
import fcntl
import logging
import os
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._errors import CheckpointError
from . import committed
from .atomic import delete, fsync
from .opening import open_folder, open_plain
from .storage import is_misspelled_step, is_step, step_name, Steps, Storage


logger = logging.getLogger("eqx_ckpt")
# `.000100.<uuid>`: the directory of an attempt, or the lock of its process.
_CLAIM = re.compile(r"(\..+\.[0-9a-f]{32})\.(?:tmp|lock)")


class DirectorySteps(Steps):
    """As `Steps`; the function removes checkpoints."""

    def __init__(self, run: Storage, remove: Callable[[Iterable[str]], None]) -> None:
        self._run = run
        self._path: str = run.spec["path"]
        self._remove = remove
        # By step: the identity and the metadata of its checkpoint.
        self._metadata: dict[int, tuple[object, Any]] = {}
        self._strangers: dict[str, bool] = {}
        # The directory, so that one that was moved can be told from one that is gone.
        self._opened: int | None = None
        self._whole = committed.SeenWhole()

    def named(self) -> list[int]:
        return sorted(int(name) for name in self._names() if is_step(name))

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def check_place(self) -> None:
        if self._opened is not None:
            was = os.fstat(self._opened)
            if _is_at(was, self._path):
                return
            if was.st_nlink:
                raise CheckpointError(
                    f"{self._run.url()!r} is not the directory that this manager began "
                    "to use: that was moved, with its steps. Nothing was done. Move it "
                    "back, or make a `CheckpointManager` of the path where it is now."
                )
        # None was there yet, or it was deleted: a run begins anew.
        with contextlib.suppress(OSError):
            self._opened = open_folder(self._path)
            weakref.finalize(self, os.close, self._opened)

    def saved(self, doubtful: dict[int, OSError] | None = None) -> list[int]:
        self.check_place()
        names = self._names()
        named = sorted(int(name) for name in names if is_step(name))
        places = {step: self._step(step) for step in named}
        steps = committed.committed_steps(places, doubtful)
        # Another process may have removed one meanwhile, after saving a newer one.
        vanished = len(steps) < len(named) and not {*named} <= {*self.named()}
        if not vanished:
            others = {*named} - {*steps} - {*(doubtful or ())}
            self._strangers = {
                step_name(step): False
                for step in others
                if _has_entries(places[step].url())
            }
            for name in filter(is_misspelled_step, names):
                with contextlib.suppress(OSError):
                    if committed.is_checkpoint(self._run / f"{name}/"):
                        self._strangers[name] = True
            return steps
        if doubtful is not None:
            doubtful.clear()
        return self.saved(doubtful)

    def strangers(self) -> dict[str, bool]:
        return self._strangers

    def metadata(self, step: int) -> Any:
        """Read again only if the step was replaced."""
        place = self._step(step)
        now = place.identity()
        if step not in self._metadata or self._metadata[step][0] != now:
            self._metadata[step] = now, committed.read_metadata(place)[1]
        return self._metadata[step][1]

    def problem(self, step: int) -> str:
        return self._whole.problem(self._step(step))

    def remove(self, steps: Sequence[int]) -> None:
        self._remove(self._step(step).url() for step in steps)

    def sweep(self, *, starting: bool) -> None:
        """On a disk, sweeping once is enough."""
        if starting:
            _sweep(self._path)

    def orphans(self) -> dict[str, int | None]:
        stems = [os.path.join(self._path, name) for name in _claims(self._path)]
        dead = [f"{stem}.tmp" for stem in stems if _is_dead(stem)]
        return {path: _nbytes(path) for path in dead}

    def sweep_all(self) -> None:
        self.sweep(starting=True)

    def _step(self, step: int) -> Storage:
        return self._run / f"{step_name(step)}/"


def _is_at(was: os.stat_result, path: str) -> bool:
    try:
        return os.path.samestat(was, os.stat(path))
    except OSError:
        return False


def _has_entries(path: str) -> bool:
    try:
        return bool(os.listdir(path))
    except OSError:
        return False


def _claims(directory: str) -> list[str]:
    """The hidden names of attempts in a directory, without `.tmp` or `.lock`."""
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted({m[1] for name in names if (m := _CLAIM.fullmatch(name))})


def _is_dead(stem: str) -> bool:
    """Whether no process holds the lock of an attempt; changes nothing."""
    # The lock is held before there is a directory.
    if not os.path.lexists(f"{stem}.tmp"):
        return False
    try:
        lock = open_plain(f"{stem}.lock")[0]
    except FileNotFoundError:
        return os.path.lexists(f"{stem}.tmp")
    except OSError as e:
        logger.warning("%s.tmp stays: its lock cannot be opened: %s", stem, e)
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _nbytes(path: str) -> int:
    """Bytes of the files below a path, some of which may vanish meanwhile."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _sweep(directory: str) -> None:
    """Remove what dead attempts left in a directory, and nothing of a live one."""
    for name in _claims(directory):
        _sweep_one(os.path.join(directory, name))


def _sweep_one(stem: str) -> None:
    try:
        lock = open_plain(stem + ".lock", os.O_RDWR | os.O_CREAT)[0]
    except OSError as e:
        # Of another user, or a link: of the others, something can be removed.
        logger.warning("%s.tmp stays: its lock cannot be opened: %s", stem, e)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            logger.info("Removing %s.tmp, which a dead process left.", stem)
            # What that exchanged or hid must not reappear half deleted.
            fsync(os.path.dirname(stem))
            delete(stem + ".tmp")
            os.unlink(stem + ".lock")
    except BlockingIOError:
        logger.debug("%s.tmp is in use.", stem)
    finally:
        os.close(lock)
