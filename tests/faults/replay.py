"""What a power cut could have left of a run that the shim has logged.

POSIX promises little: the bytes of a file are safe only after an fsync of the file, and
a name (created, renamed, removed) only after an fsync of its directory; until then any
of the changes may be there or not. `explore` builds such states, after every operation
of the log, and shows each to a checker. ext4 and XFS promise more than this model.

A rename is one change: it is there as a whole or not at all.
"""

import hashlib
import os
import pathlib
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


# What of the bytes that were not synced is there: all, none, zeros, or one half.
MODES = ("kept", "synced", "zeros", "half")


@dataclass(frozen=True)
class Operation:
    """One record of the log."""

    what: str
    path: str
    other: str
    number: int
    data: bytes

    def __str__(self) -> str:
        return f"{self.what} {self.path} {self.other}".rstrip()


@dataclass
class Node:
    """A file or a directory; `data` is None for a directory."""

    data: bytearray | None
    synced: bytes = b""


@dataclass
class Change:
    """Names that appear or vanish together: (directory, name, node or None)."""

    edits: list[tuple[int, str, int | None]]
    settled: bool = False


@dataclass(frozen=True)
class Bad:
    """A state that the checker refused."""

    after: str  # the last operation that was begun
    lost: str  # what of the unsynced changes is gone
    reason: str

    def __str__(self) -> str:
        return f"after {self.after!r}, {self.lost}: {self.reason}"


@dataclass
class Result:
    states: int = 0
    bad: list[Bad] = field(default_factory=list)

    def __str__(self) -> str:
        shown = "\n".join(str(bad) for bad in self.bad[:10])
        return f"{len(self.bad)} bad of {self.states} states\n{shown}"


def explore(
    log: pathlib.Path,
    root: pathlib.Path,
    initial: pathlib.Path,
    scratch: pathlib.Path,
    check: Callable[[pathlib.Path, list[str]], None],
    since: str = "",
) -> Result:
    """Check every distinct state that a power cut could have left.

    `root` is where the logged run wrote, `initial` a copy of what was there before.
    `check(directory, notes)` raises if a state, rebuilt in `directory` below `scratch`,
    is bad; `notes` are those that the run had written by then. Power cuts before the
    note `since` are left out.
    """
    disk = Disk(str(root), initial)
    result = Result()
    seen: set[bytes] = set()
    notes: list[str] = []
    for operation in read_log(log):
        if operation.what == "note":
            notes.append(operation.path)
        else:
            disk.apply(operation)
        if since and since not in notes:
            continue
        for lost, files in disk.states():
            digest = _digest(files, notes)
            if digest in seen:
                continue
            seen.add(digest)
            result.states += 1
            reason = _refusal(files, scratch, check, notes)
            if reason:
                result.bad.append(Bad(str(operation), lost, reason))
    return result


def read_log(log: pathlib.Path) -> list[Operation]:
    operations = []
    with log.open("rb") as lines:
        while line := lines.readline():
            what, path, other, number, size = line.decode().rstrip("\n").split("\t")
            data = lines.read(int(size))
            operations.append(Operation(what, path, other, int(number), data))
    return operations


class Disk:
    """A tree of nodes, and the changes of it that no sync has settled."""

    def __init__(self, root: str, initial: pathlib.Path) -> None:
        self.root = root
        self.nodes = [Node(None)]
        self.entries: dict[int, dict[str, int]] = {0: {}}  # as the process sees them
        self.changes: list[Change] = []
        for directory, folders, files in os.walk(initial):
            place = root + directory[len(str(initial)) :]
            for name in folders:
                self._create(f"{place}/{name}", None)
            for name in files:
                data = pathlib.Path(directory, name).read_bytes()
                self._create(f"{place}/{name}", data)
        self._sync_all()

    def apply(self, operation: Operation) -> None:
        path, other = operation.path, operation.other
        match operation.what:
            case "create":
                self._create(path, b"")
            case "mkdir":
                self._create(path.rstrip("/"), None)
            case "truncate":
                self._resize(path, operation.number)
            case "write":
                self._write(path, operation.number, operation.data)
            case "fsync":
                self._sync(self._find(path))
            case "syncfs":
                self._sync_all()
            case "rename":
                node = self._find(path)
                self._edit((*self._place(path), None), (*self._place(other), node))
            case "exchange":
                one, two = self._find(path), self._find(other)
                self._edit((*self._place(path), two), (*self._place(other), one))
            case "link":
                self._edit((*self._place(other), self._find(path)))
            case "unlink":
                self._edit((*self._place(path), None))
            case what:
                raise ValueError(f"The log has an operation {what!r}.")

    def states(self) -> Iterator[tuple[str, dict[str, bytes | None]]]:
        """What a power cut now could leave: what is lost, and the files."""
        pending = self._pending()
        every = frozenset(pending)
        for mode in MODES:
            yield f"all names kept, data {mode}", self._files(every, mode)
        yield "no name kept", self._files(frozenset(), "synced")
        for directory in {d for i in pending for d, _, _ in self.changes[i].edits}:
            here = frozenset(
                i
                for i in pending
                if any(d == directory for d, _, _ in self.changes[i].edits)
            )
            yield "one directory's names kept", self._files(here, "synced")
            yield "one directory's names lost", self._files(every - here, "kept")
        for i in pending:
            edits = self.changes[i].edits
            yield f"only {edits} kept", self._files(frozenset({i}), "synced")
            yield f"only {edits} lost", self._files(every - {i}, "kept")

    def drawn(self, chance: random.Random) -> dict[str, bytes | None]:
        """The files of one of all states that a power cut now could leave."""
        share = chance.choice((0.0, 0.5, 1.0, chance.random()))
        kept = frozenset(i for i in self._pending() if chance.random() < share)
        return self._files(kept, chance.choice(MODES))

    def _pending(self) -> list[int]:
        return [i for i, change in enumerate(self.changes) if not change.settled]

    def _files(self, kept: frozenset[int], mode: str) -> dict[str, bytes | None]:
        entries: dict[int, dict[str, int]] = {}
        for i, change in enumerate(self.changes):
            if change.settled or i in kept:
                for directory, name, node in change.edits:
                    names = entries.setdefault(directory, {})
                    names.pop(name, None)
                    if node is not None:
                        names[name] = node
        files: dict[str, bytes | None] = {}
        self._walk(0, "", entries, mode, files)
        return files

    def _walk(
        self,
        directory: int,
        prefix: str,
        entries: dict[int, dict[str, int]],
        mode: str,
        files: dict[str, bytes | None],
    ) -> None:
        for name, i in entries.get(directory, {}).items():
            node = self.nodes[i]
            if node.data is None:
                files[prefix + name] = None
                self._walk(i, f"{prefix}{name}/", entries, mode, files)
            else:
                files[prefix + name] = _content(node, mode)

    def _place(self, path: str) -> tuple[int, str]:
        """The directory of a path, as a node, and its last name."""
        parent, name = os.path.split(path)
        return self._find(parent), name

    def _find(self, path: str) -> int:
        node = 0
        for name in path[len(self.root) :].strip("/").split("/"):
            node = self.entries[node][name] if name else node
        return node

    def _create(self, path: str, data: bytes | None) -> None:
        node = len(self.nodes)
        self.nodes.append(Node(None if data is None else bytearray(data)))
        self.entries[node] = {}
        self._edit((*self._place(path), node))

    def _edit(self, *edits: tuple[int, str, int | None]) -> None:
        for directory, name, node in edits:
            self.entries[directory].pop(name, None)
            if node is not None:
                self.entries[directory][name] = node
        self.changes.append(Change(list(edits)))

    def _data(self, path: str) -> bytearray:
        data = self.nodes[self._find(path)].data
        assert data is not None, f"{path} is a directory"
        return data

    def _resize(self, path: str, size: int) -> None:
        data = self._data(path)
        del data[size:]
        data.extend(bytes(size - len(data)))

    def _write(self, path: str, offset: int, new: bytes) -> None:
        data = self._data(path)
        data.extend(bytes(max(0, offset - len(data))))
        data[offset : offset + len(new)] = new

    def _sync(self, node: int) -> None:
        data = self.nodes[node].data
        if data is not None:
            self.nodes[node].synced = bytes(data)
        for change in self.changes:
            change.settled |= any(d == node for d, _, _ in change.edits)

    def _sync_all(self) -> None:
        for node in self.nodes:
            if node.data is not None:
                node.synced = bytes(node.data)
        for change in self.changes:
            change.settled = True


def _content(node: Node, mode: str) -> bytes:
    data = bytes(node.data or b"")
    if mode == "kept" or data == node.synced:
        return data
    if mode == "zeros":
        return bytes(len(data))
    return data[: len(data) // 2] if mode == "half" else node.synced


def _digest(files: dict[str, bytes | None], notes: list[str]) -> bytes:
    digest = hashlib.sha256(repr(notes).encode())
    for path in sorted(files):
        data = files[path]
        size = -1 if data is None else len(data)
        digest.update(f"{path}\0{size}\0".encode() + (data or b""))
    return digest.digest()


def write_files(directory: pathlib.Path, files: dict[str, bytes | None]) -> None:
    """Make a directory with these files."""
    directory.mkdir()
    for path, data in files.items():  # a directory comes before what is in it
        if data is None:
            (directory / path).mkdir()
        else:
            (directory / path).write_bytes(data)


def _refusal(
    files: dict[str, bytes | None],
    scratch: pathlib.Path,
    check: Callable[[pathlib.Path, list[str]], None],
    notes: list[str],
) -> str:
    """What the checker says against a state, or ''."""
    directory = scratch / "state"
    try:
        write_files(directory, files)
        check(directory, notes)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    finally:
        shutil.rmtree(directory)
    return ""
