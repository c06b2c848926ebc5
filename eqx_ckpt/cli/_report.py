"""The command that writes a page."""

from typing import Any

import eqx_ckpt

from .._report.write import written
from .._steps import Run
from ._guard import DAMAGED, TROUBLE
from ._output import NO_CHECKSUMS, say, say_problem
from ._sources import found_at


def report(path: str, other: str | None, output: str, how: dict[str, Any]) -> int:
    source = _found(path)
    compared = None if other is None else _found(other)
    try:
        facts = written(source, output, compared, **how)
    except ImportError as e:
        raise eqx_ckpt.CheckpointError(str(e)) from None
    shouts = facts["shouts"]
    for shout in shouts:
        say_problem(shout["text"])
    for column in facts["columns"]:
        if not column["checksums"]:
            say(f"{column['path']}: {NO_CHECKSUMS}")
    say(f"wrote {output}")
    if any(shout["unreadable"] for shout in shouts):
        return TROUBLE
    return DAMAGED if shouts else 0


def _found(path: str) -> str | eqx_ckpt.Source:
    """A run, a checkpoint, or a source of another format."""
    return path if Run(path).readable_or_not() else found_at(path)
