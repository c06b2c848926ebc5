"""The steps of a run in a directory; nothing is cached that could be stale."""

import contextlib
import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from ..._errors import CheckpointError, CheckpointNotFoundError
from ..._format.manifest import MANIFEST
from ..._format.references import INCREMENTAL
from ..calls.opening import open_folder
from ..calls.posix_calls import delete, fsync
from ..calls.safe_files import write_file, writing_to
from ..interface import committed_manifest as committed
from ..interface.attempt_lock import (
    attempts_in,
    is_dead,
    locked_attempt,
    sweep_attempts,
    target_of,
)
from ..interface.place import (
    is_beside,
    is_misspelled_step,
    is_step,
    step_name,
    Steps,
    Storage,
)


logger = logging.getLogger("eqx_ckpt")


class DirectorySteps(Steps):
    """The steps of a run, each in a directory of its own."""

    def __init__(self, run: Storage) -> None:
        self._run = run
        self._path: str = run.spec["path"]
        # By step: the identity and the metadata of its checkpoint.
        self._metadata: dict[int, tuple[object, Any]] = {}
        self._unusable: dict[str, bool] = {}
        # The directory, so that one that was moved can be told from one that is gone.
        self._opened: int | None = None
        self._intact = committed.SeenIntact()

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
                    "back, or create a `CheckpointManager` of its path now."
                )
        # None was there yet, or it was deleted: a run begins anew.
        with contextlib.suppress(OSError):
            self._opened = open_folder(self._path)
            # At the end of the interpreter, a save may still need it.
            weakref.finalize(self, os.close, self._opened).atexit = False

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
            self._unusable = {
                step_name(step): False
                for step in others
                if _has_entries(places[step].url())
            }
            for name in filter(is_misspelled_step, names):
                with contextlib.suppress(OSError):
                    if committed.is_checkpoint(self._run / f"{name}/"):
                        self._unusable[name] = True
            return steps
        if doubtful is not None:
            doubtful.clear()
        return self.saved(doubtful)

    def unusable(self) -> dict[str, bool]:
        return self._unusable

    def metadata(self, step: int) -> Any:
        """Read again only if the step was replaced."""
        place = self._step(step)
        now = place.identity()
        if step not in self._metadata or self._metadata[step][0] != now:
            self._metadata[step] = now, committed.read_metadata(place)[1]
        return self._metadata[step][1]

    def problem(self, step: int) -> str:
        return self._intact.problem(self._step(step))

    def own_bytes(self, steps: Sequence[int]) -> dict[int, int]:
        """A step may be a link to a checkpoint elsewhere, which its deletion keeps."""
        return {step: _nbytes(self._step(step).url()) for step in steps}

    def remove(self, steps: Sequence[int]) -> None:
        if steps:
            check_shares_nothing(self._step(steps[0]).url())
        _remove(self._step(step).url() for step in steps)

    def beside(self, kind: str) -> list[str]:
        return sorted(name for name in self._names() if is_beside(kind, name))

    def read_beside(self, name: str) -> bytes | None:
        return self._run.read(name)

    def write_beside(self, name: str, value: bytes) -> None:
        path = os.path.join(self._path, name)
        try:
            with writing_to(path, "try again"):
                write_file(path, [value])
                fsync(path)
        except FileExistsError:
            raise
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        fsync(self._path)

    def delete_beside(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._path, name))

    def sweep(self) -> None:
        sweep_attempts(self._path, self._still_needed)

    def _still_needed(self, stem: str) -> str:
        """Why the checkpoint of a dead attempt stays, which was replaced, or `''`.

        It goes when what has replaced it is intact, as after a save that lives.
        """
        target = target_of(stem)
        try:
            if not _is_older(f"{stem}.tmp", target):
                return ""
            problem = self._intact.problem(self._run.at(f"{target}/"))
        except CheckpointNotFoundError:
            return ""
        except OSError as e:
            problem = str(e)
        return problem and (
            f"it is a checkpoint, and {target!r}, which has replaced it, is not "
            f"intact: {problem}. Keep one of them, and delete the other one."
        )

    def orphans(self) -> dict[str, int | None]:
        stems = [os.path.join(self._path, name) for name in attempts_in(self._path)]
        dead = [
            f"{stem}.tmp"
            for stem in stems
            if is_dead(stem) and not self._still_needed(stem)
        ]
        return {path: _nbytes(path) for path in dead}

    def sweep_all(self) -> None:
        self.sweep()

    def _step(self, step: int) -> Storage:
        return self._run / f"{step_name(step)}/"


def check_shares_nothing(path: str) -> None:
    """Raise if others may need what is in the directory of a step."""
    run, name = os.path.split(path)
    if is_step(name) and os.path.isfile(f"{run}/{INCREMENTAL}"):
        raise CheckpointError(
            f"{run!r} was copied from a store, where its steps share chunks: without "
            f"what is in {name!r}, others could not be read. Nothing was removed. Copy "
            "the steps that you need with `eqx_ckpt.copy`, and remove the directory."
        )


def _is_older(one: str, other: str) -> bool:
    """Whether two directories have a manifest, of which the first is the older one."""
    try:
        times = [os.lstat(f"{path}/{MANIFEST}").st_mtime_ns for path in (one, other)]
    except (FileNotFoundError, NotADirectoryError):
        return False
    return times[0] <= times[1]


def _is_at(was: os.stat_result, path: str) -> bool:
    try:
        return os.path.samestat(was, os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _has_entries(path: str) -> bool:
    try:
        return bool(os.listdir(path))
    except OSError:
        return False


def _nbytes(path: str) -> int:
    """What a file takes, or those below a path; some may vanish meanwhile.

    A file that is shared with another checkpoint takes nothing.
    """
    if not os.path.isdir(path) or os.path.islink(path):
        files = [path]
    else:
        files = [
            f"{folder}/{name}" for folder, _, names in os.walk(path) for name in names
        ]
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            status = os.lstat(file)
            total += status.st_size if status.st_nlink == 1 else 0
    return total


def _remove(checkpoints: Iterable[str]) -> None:
    """Delete checkpoints in one directory; none is ever visible in part.

    Their names are removed first, durably, and then their content.
    """
    with contextlib.ExitStack() as stack:
        hidden: list[str] = []
        try:
            for path in checkpoints:
                temporary = stack.enter_context(locked_attempt(path)) + ".tmp"
                # Another process may have removed it.
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path, temporary)
                    hidden.append(temporary)
        finally:
            # Those before the one that failed are removed all the same.
            if hidden:
                fsync(os.path.dirname(hidden[0]))
            for temporary in hidden:
                delete(temporary)
