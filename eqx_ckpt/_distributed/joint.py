"""One checkpoint, saved by all processes of a job: the same steps, with agreement.

Process 0 begins and commits. In between, each process writes its part of the arrays,
and makes it durable.
"""

import contextlib
import functools as ft
import hashlib
import os
import shutil
from collections.abc import Generator, Sequence
from typing import Any
from zlib import crc32

from .._errors import CheckpointError, LeafMismatchError
from .._storage.bucket import ATTEMPTS
from .._storage.chunk_values import link_databases
from .._storage.directory import Attempt, flush
from .._storage.kvstore import KvSpec, locate, shown
from .._tree.plan import Write
from .._types import Layout, PathLike, Tails
from .assignment import assign, place_of
from .group import Group, group_of
from .meeting import from_json, to_json


class JointAttempt:
    """As `Attempt`, in each of several processes."""

    base: KvSpec
    root: str

    def __init__(
        self,
        group: Group,
        target: KvSpec,
        overwrite: bool,
        layout: Layout,
        writes: Sequence[Write],
    ) -> None:
        if target["driver"] == "memory":
            raise CheckpointError(
                f"{shown(target)} is in the memory of one process. Several processes "
                "have to save to one shared directory."
            )
        self.is_first = group.is_first
        self._group = group
        self.part = f"p{group.index}/"
        place = f"path {shown(target)}, overwrite={overwrite}, layout={layout!r}"
        self._outline = [place, *map(_line, writes)]
        self._writes = writes
        self._target = target
        self._overwrite = overwrite
        self._attempt: Attempt | None = None
        self._directory: int | None = None
        # The topic on which the others wait for what this process says.
        self._awaited = ""

    def agree(self) -> list[Write]:
        """Agree on what is saved, and where; returns what this process writes."""
        try:
            places = _agree(self._group, self._outline, self._writes)
        except BaseException as e:
            self.fail(e)
            self._group.close()
            raise
        arrays = [write for write in self._writes if write.leaf is not None]
        self._writes = []
        return assign(arrays, self._group.size, self._group.index, places)

    def begin(self) -> None:
        """Let process 0 begin."""
        place = self._group.by_first("begun", self._begin)
        self._awaited = "written"
        self.base, self.root = place["base"], place["root"]
        if not self.is_first and self.base["driver"] == "file":
            self._open_directory()

    def _begin(self) -> dict[str, Any]:
        kind = ATTEMPTS[self._target["driver"]]
        self._attempt = kind(self._target, self._overwrite)
        return {"base": self._attempt.base, "root": self._attempt.root}

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

    def is_to_commit(self, tails: Tails, layout: Layout) -> bool:
        """Wait until all have written; on process 0, that all is there to commit.

        `tails`, of what this process has written, then has what all have. On the
        others, wait for the commit.
        """
        if self._directory is not None:
            flush(self._directory, self.base["path"])
        said = self._tell(None, tails)
        if self.is_first:
            self._awaited = "committed"
            for name, position, tail in (item for items in said for item in items):
                tails[name][position] = tail
            if layout == "ocdbt":
                link_databases(self.base, [f"p{i}/" for i in range(len(said))])
            return True
        self._group.by_first("committed", _nothing)
        return False

    def commit(self, manifest: bytes) -> None:
        self._awaited = ""
        self._group.by_first("committed", ft.partial(self._commit, manifest))

    def _commit(self, manifest: bytes) -> None:
        assert self._attempt is not None
        # Who did not want to wait any longer has reported a failure.
        for index, error in self._group.said("given up").items():
            raise from_json(index, error)
        self._attempt.commit(manifest)

    def fail(self, error: BaseException) -> None:
        """Tell the others, unless they know."""
        with contextlib.suppress(CheckpointError, type(error)):
            if self._awaited == "written":
                # This waits: nothing may be removed while the others write.
                self._tell(error, {})
            elif self._awaited == "committed":
                self._awaited = ""
                self._group.by_first("committed", ft.partial(_raise, error))
            else:
                # They know, unless it is process 0 that was late.
                self._group.say("given up", to_json(error))
                self._group.say("written", {"error": to_json(error), "tails": []})

    def _tell(self, error: BaseException | None, tails: Tails) -> list[Any]:
        """Say what this process has written, or why not, and hear it of the others."""
        self._awaited = ""
        told: dict[str, Any] = {
            "error": None if error is None else to_json(error),
            "tails": [
                (n, i, tail) for n, of in tails.items() for i, tail in of.items()
            ],
        }
        said = self._group.gather("written", told)
        for index, other in enumerate(said):
            if other["error"] is not None and error is None:
                raise from_json(index, other["error"])
        return [other["tails"] for other in said]

    def abandon(self) -> None:
        if self._directory is not None:
            # If process 0 did not wait, this process has written to a new one.
            if not os.fstat(self._directory).st_nlink:
                shutil.rmtree(self.base["path"], ignore_errors=True)
            os.close(self._directory)
        if self._attempt is not None:
            self._attempt.abandon()


def all_saving(path: PathLike, deadline: float) -> Group | None:
    """The processes that all save to this path, unless there is but one."""
    try:
        place = shown(locate(path))
    except Exception:
        # The reason is raised later, when all processes can be told.
        place = repr(path)
    return group_of(f"save({place})", deadline)


def _line(write: Write) -> str:
    """What has to be the same of a leaf in all processes."""
    name, record, leaf, _ = write
    line = f"leaf {name!r}, {record}, "
    if len(place_of(leaf)) == 1:
        line += "of one process"
    else:
        line += f"sharded as {record.sharding}, in chunks of {record.chunk_shape}"
    compression = f", compression={record.compression!r}" if record.is_array else ""
    return line + compression


@contextlib.contextmanager
def telling(group: Group | None) -> Generator[None, None, None]:
    """What fails in here, before there is a plan, fails in all processes."""
    try:
        yield
    except Exception as e:
        if group is not None:
            refuse(group, e)
        raise


def refuse(group: Group, error: BaseException) -> None:
    """Tell the others that there is no plan here."""
    with contextlib.suppress(CheckpointError):
        group.gather("plan", {"error": to_json(error)})
    group.close()


def _agree(
    group: Group, outline: Sequence[str], writes: Sequence[Write]
) -> dict[str, int]:
    """The leaves that are on one process, and that for all of them."""
    places = {
        write.name: min(place)
        for write in writes
        if len(place := place_of(write.leaf)) == 1 and place != {group.index}
    }
    digest = hashlib.sha256("\n".join(outline).encode()).hexdigest()
    plans = group.gather("plan", {"digest": digest, "places": places})
    for index, plan in enumerate(plans):
        if "error" in plan:
            raise from_json(index, plan["error"])
    if any(plan["digest"] != digest for plan in plans):
        raise _different(group, outline)
    places = {name: of for plan in plans for name, of in plan["places"].items()}
    for name, of in places.items():
        for index, plan in enumerate(plans):
            found = plan["places"].get(name, index)
            if found != of:
                raise LeafMismatchError(
                    f"Leaf {name!r} is on the devices of process {found} in process "
                    f"{index}, and of process {of} in another one. Nothing was saved. "
                    "Let all processes save the same arrays."
                )
    return places


def _different(group: Group, outline: Sequence[str]) -> LeafMismatchError:
    sums = group.gather("leaves", [crc32(line.encode()) for line in outline])
    shortest = min(map(len, sums))
    first = next(
        (i for i in range(shortest) if len({s[i] for s in sums}) > 1), shortest
    )
    mine = outline[first] if first < len(outline) else "no more leaves"
    lines = group.gather("difference", mine)
    return LeafMismatchError(
        "The processes do not save the same:\n"
        + "\n".join(f"- process {i}: {line}" for i, line in enumerate(lines))
        + "\nNothing was saved. All processes have to call this with the same path, "
        "`layout` and `compression`, and with trees of the same structure, shapes, "
        "dtypes and shardings."
    )


def _nothing() -> None: ...


def _raise(error: BaseException) -> None:
    raise error
