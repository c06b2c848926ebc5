"""`ls RUN` and `tree CKPT [PREFIX]`, without typer, whose import takes as long."""

from collections.abc import Sequence

from .exit_status import guarded
from .folder_commands import ls
from .tree_view import tree


def quickly(words: Sequence[str]) -> int | None:
    """Run one of these commands, and return its status; `None` if it is another one."""
    if any(word.startswith("-") for word in words):
        return None
    match words:
        case ["ls", run]:
            return guarded(lambda: ls(run, "", "min", False, None, False))
        case ["tree", path]:
            return guarded(lambda: tree(path, "", None, "", False))
        case ["tree", path, prefix]:
            return guarded(lambda: tree(path, prefix, None, "", False))
        case _:
            return None
