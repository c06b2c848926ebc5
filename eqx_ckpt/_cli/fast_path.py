"""`ls RUN [--best METRIC]` and `tree CKPT [PREFIX]`, without typer and without JAX.

Their imports take as long.
"""

from collections.abc import Sequence

from .exit_status import guarded
from .folder_commands import ls
from .tree_view import tree


def quickly(words: Sequence[str]) -> int | None:
    """Run one of these commands, and return its status; `None` if it is another one."""
    best: str | None = None
    match words:
        case ["ls", run, "--best", best] | ["ls", "--best", best, run]:
            words = ["ls", run]
        case _:
            pass
    if any(word.startswith("-") for word in [*words, best or ""]):
        return None
    match words:
        case ["ls", run]:
            return guarded(lambda: ls(run, best, "min", False, None, False))
        case ["tree", path]:
            return guarded(lambda: tree(path, "", None, "", False))
        case ["tree", path, prefix]:
            return guarded(lambda: tree(path, prefix, None, "", False))
        case _:
            return None
