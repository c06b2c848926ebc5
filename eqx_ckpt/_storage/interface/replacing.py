"""Decide, for all writers, whether what is at a path may be replaced.

Each writer checks before it begins, and again before it puts its work in place.
"""

import os
import stat
from collections.abc import Callable
from typing import Any, NamedTuple

from ..._errors import CheckpointError, CheckpointExistsError
from ..._format.manifest import MANIFEST
from ..._format.manifest_parser import HEAD, HEAD_BYTES
from ..._format.sample_record import RECORD
from ..._types import check_flag
from ..calls.opening import NotPlain, open_plain


# Files that a directory of one kind has: of ours, of Orbax, and of JAX.
_MARKS = (MANIFEST, RECORD, "_METADATA", "_CHECKPOINT_METADATA", "pytreedef.json")


_OF_OTHERS = "checkpoint of another library"


# How often to look again at what comes and goes.
_LOOKS = 100


class Kind(NamedTuple):
    """What a writer writes, which is all that it replaces.

    **Attributes:**

    - `name`: for errors, such as `"an npz file"`.
    - `differs`: a sentence why what is at a path is something else, or `""`.
    - `is_folder`: whether it is a directory, and not a file.
    - `is_state`: whether it is a state, which its recording commits in itself.
    """

    name: str
    differs: Callable[[str], str]
    is_folder: bool = False
    is_state: bool = False


def opened_by(read: Callable[[str], Any]) -> Callable[[str], str]:
    """A `Kind.differs`: what a function reads without an error is of the kind."""

    def differs(path: str) -> str:
        try:
            read(path)
        except CheckpointError as e:
            return str(e)
        return ""

    return differs


def is_replacement(path: str, kind: Kind, *, overwrite: bool) -> bool:
    """Whether something at an absolute path is replaced; raise if it may not be.

    An empty directory is nothing. Of a symbolic link, the link is replaced, and what it
    leads to stays.
    """
    if overwrite is not True and overwrite is not False:
        check_flag("overwrite", overwrite)
    if "\0" in path:
        raise CheckpointError(f"{path!r} is not a path: it has a NUL.")
    check_above(path, is_state=kind.is_state)
    for _ in range(_LOOKS):
        try:
            return _is_replaced(path, kind, overwrite)
        except FileNotFoundError:
            # Nothing is there, or another process makes or removes it meanwhile.
            if not os.path.lexists(path):
                return False
    return _is_replaced(path, kind, overwrite)


def _is_replaced(path: str, kind: Kind, overwrite: bool) -> bool:
    is_link = stat.S_ISLNK(os.lstat(path).st_mode)
    try:
        mode = os.stat(path).st_mode
    except OSError:
        if not is_link:
            raise
        mode = 0  # A link that leads nowhere.
    if not (stat.S_ISDIR if kind.is_folder else stat.S_ISREG)(mode):
        raise CheckpointExistsError(
            f"{path!r} is {_described(mode)}, and {kind.name} is to be written. "
            "Nothing was written; choose another path."
        )
    if kind.is_folder:
        _check_not_current(path)
        if not is_link and not os.listdir(path):
            return False
    if not overwrite:
        raise already_there(repr(path))
    if problem := kind.differs(path):
        raise CheckpointExistsError(
            f"{path!r} exists, and `overwrite=True` replaces only {kind.name}. "
            f"{problem} Nothing was written; move it away, or choose another path."
        )
    return True


def check_above(path: str, *, is_state: bool = False) -> None:
    """Raise if a path is inside a checkpoint or a recording, unless it is its state."""
    parent, name = os.path.split(path)
    resolved = os.path.join(os.path.realpath(parent), name)
    what, above = whole_above(resolved)
    if what and not (is_state and what == "recording"):
        raise inside(repr(path), what, repr(above))


def whole_above(path: str) -> tuple[str, str]:
    """The closest checkpoint or recording above a path: which of them, and where."""
    parent, name = os.path.split(path)
    while name:
        # Cheaper than a failure to open each of them, in each save.
        names = [name for name in _MARKS if os.access(f"{parent}/{name}", os.F_OK)]
        if MANIFEST in names and has_manifest(parent):
            return "checkpoint", parent
        if names and names != [MANIFEST]:
            is_recording = RECORD in names
            return "recording" if is_recording else _OF_OTHERS, parent
        parent, name = os.path.split(parent)
    return "", ""


def has_manifest(directory: str, folder: int | None = None) -> bool:
    """Whether the manifest of a checkpoint is in a directory.

    Its path may be relative to a folder that is open.
    """
    try:
        fd, _ = open_plain(f"{directory}/{MANIFEST}", folder=folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError, NotPlain):
        return False
    try:
        return HEAD.match(os.read(fd, HEAD_BYTES)) is not None
    finally:
        os.close(fd)


def inside(where: str, what: str, above: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{where} is inside of the {what} {above}, in which nothing else belongs. "
        "Nothing was written; choose a path beside it."
    )


def already_there(where: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{where} exists already. Nothing was written, and it was left as it is: "
        "choose another path or step, remove it, or pass `overwrite=True` to a "
        "function that takes it."
    )


def remove_replaced(
    where: str,
    problem: str,
    *,
    remove: Callable[[], None],
    put_back: Callable[[], None],
) -> None:
    """Remove what a checkpoint has replaced, if that is intact; or put it back.

    `problem` says why the new one is not intact, seen since its commit, or is `''`.
    """
    if not problem:
        remove()
        return
    put_back()
    raise CheckpointError(
        f"What was written to {where} is not intact any more: {problem}. Nothing was "
        "saved, and what was there before is there again; save again."
    )


def check_inode(folder: int, inode: int, path: str) -> None:
    """Raise unless an open directory is the one that process 0 has opened."""
    if os.fstat(folder).st_ino != inode:
        raise CheckpointError(
            f"{path!r} is not the directory that process 0 has opened there. Somebody "
            "who may write to its parent directory has replaced it: use one that only "
            "you can write to. Or it has another inode on each machine, as where an "
            "object store is mounted: use its URL. Nothing was written to it."
        )


def _check_not_current(path: str) -> None:
    try:
        current = os.getcwd()
    except FileNotFoundError:
        return  # It was deleted.
    if f"{current}/".startswith(os.path.realpath(path).rstrip("/") + "/"):
        raise CheckpointExistsError(
            f"{path!r} is the current directory, or contains it, and would be "
            "replaced. Nothing was written; choose another path."
        )


def _described(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a directory"
    if not mode:
        return "a symbolic link that leads nowhere"
    return "a file" if stat.S_ISREG(mode) else "neither a file nor a directory"


def inside_of(what: str, above: str, part: str = "") -> str:
    """A sentence about a path inside a checkpoint or a recording; `""` for neither."""
    if what not in ("checkpoint", "recording"):
        return ""
    prefix = f" and `prefix={part!r}`" if part else ""
    return f"It is inside of the {what} {above!r}: pass that{prefix}."
