"""One checkpoint, saved by all processes of a job: the same steps, with agreement.

Process 0 begins and commits. In between, each process writes its part of the arrays,
and makes it durable.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from ._assignment import assign, is_local
from ._commit import Attempt, ATTEMPTS, flush
from ._errors import CheckpointError, LeafMismatchError
from ._plan import Write
from ._processes import Group
from ._store import KvSpec


class JointAttempt:
    """As `Attempt`, in each of several processes."""

    base: KvSpec
    root: str

    def __init__(
        self, group: Group, target: KvSpec, overwrite: bool, writes: Sequence[Write]
    ) -> None:
        self.is_first = group.index == 0
        self._group = group
        self._outline = _outline(target["path"], overwrite, writes)
        self._target = target
        self._overwrite = overwrite
        self._attempt: Attempt | None = None
        self._directory: int | None = None
        self._told = False

    def begin(self) -> None:
        """Agree on what is saved, and where; then process 0 begins."""
        try:
            _agree(self._group, self._outline)
        except CheckpointError:
            self._told = True  # All of them know.
            raise
        place = None
        if self._group.index == 0:
            try:
                kind = ATTEMPTS[self._target["driver"]]
                self._attempt = kind(self._target, self._overwrite)
                place = {"base": self._attempt.base, "root": self._attempt.root}
            except Exception as e:
                self._group.from_first("begun", {"error": _to_json(e)})
                self._told = True
                raise
        place = self._group.from_first("begun", place)
        if "error" in place:
            self._told = True
            raise _from_json(0, place["error"])
        self.base, self.root = place["base"], place["root"]
        if self.base["driver"] == "file":
            self._open_directory()

    def _open_directory(self) -> None:
        path = self.base["path"]
        try:
            # Opened before the first write: it reports the errors of writes since then.
            self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            raise CheckpointError(
                f"Process {self._group.index} does not see {path}, which process 0 has "
                "made. All processes have to save to one shared directory."
            ) from None

    def is_to_commit(self) -> bool:
        """Wait until all have written; on process 0, that all is there to commit.

        On the others, wait for the commit.
        """
        if self._directory is not None:
            flush(self._directory, self.base["path"])
        self._tell(None)
        if self._group.index == 0:
            return True
        error = self._group.from_first("committed")
        if error is not None:
            raise _from_json(0, error)
        return False

    def commit(self, manifest: bytes) -> None:
        assert self._attempt is not None
        try:
            self._attempt.commit(manifest)
        except Exception as e:
            self._group.from_first("committed", _to_json(e))
            raise
        self._group.from_first("committed", None)

    def fail(self, error: BaseException) -> None:
        """Tell the others at once, unless they know."""
        if not self._told:
            with contextlib.suppress(CheckpointError):
                self._tell(_to_json(error))

    def _tell(self, error: Any) -> None:
        self._told = True
        errors = self._group.gather("written", error)
        for index, other in enumerate(errors):
            if other is not None and error is None:
                raise _from_json(index, other)

    def abandon(self) -> None:
        if self._directory is not None:
            os.close(self._directory)
        if self._attempt is not None:
            self._attempt.abandon()


def assigned(group: Group, writes: Sequence[Write]) -> list[Write]:
    """What this process of the group writes."""
    return assign(writes, group.size, group.index)


def _outline(path: str, overwrite: bool, writes: Sequence[Write]) -> list[str]:
    """What has to be the same in all processes, a line for each leaf."""
    lines = [f"path {path!r}, overwrite={overwrite}"]
    for name, record, leaf, _ in writes:
        place = "of one process" if is_local(leaf) else f"sharded as {record.sharding}"
        lines.append(f"leaf {name!r}, {record}, {place}")
    return lines


def refuse(group: Group, error: BaseException) -> None:
    """Tell the others that there is no plan here."""
    with contextlib.suppress(CheckpointError):
        group.gather("plan", {"error": _to_json(error)})


def _agree(group: Group, outline: Sequence[str]) -> None:
    digest = hashlib.sha256("\n".join(outline).encode()).hexdigest()
    plans = group.gather("plan", {"digest": digest})
    for index, plan in enumerate(plans):
        if "error" in plan:
            raise _from_json(index, plan["error"])
    if all(plan == plans[0] for plan in plans):
        return
    sums = group.gather("leaves", [crc32(line.encode()) for line in outline])
    shortest = min(map(len, sums))
    first = next(
        (i for i in range(shortest) if len({s[i] for s in sums}) > 1), shortest
    )
    mine = outline[first] if first < len(outline) else "no more leaves"
    lines = group.gather("difference", mine)
    raise LeafMismatchError(
        "The processes do not save the same:\n"
        + "\n".join(f"- process {i}: {line}" for i, line in enumerate(lines))
        + "\nNothing was saved. All processes have to call this with the same path, "
        "and with trees of the same structure, shapes, dtypes and shardings."
    )


def _to_json(error: BaseException) -> dict[str, Any]:
    number = error.errno if isinstance(error, OSError) else None
    return {"kind": type(error).__name__, "text": str(error), "errno": number}


def _from_json(index: int, error: dict[str, Any]) -> Exception:
    text = f"Process {index} failed: {error['kind']}: {error['text']}"
    for kind in CheckpointError.__subclasses__():
        if kind.__name__ == error["kind"]:
            return kind(text)
    if error["errno"] is not None:
        return OSError(error["errno"], text)
    return CheckpointError(text)
