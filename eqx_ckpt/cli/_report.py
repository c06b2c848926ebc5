"""The command that writes a page."""

from typing import Any

import eqx_ckpt

from .._report.write import written
from .._steps import Run
from ._guard import DAMAGED, TROUBLE
from ._output import printable, say
from ._sources import path_or_source


def report(path: str, other: str | None, output: str, how: dict[str, Any]) -> int:
    source = _found(path)
    compared = None if other is None else _found(other)
    try:
        shouts = written(source, output, compared, **how)
    except ImportError as e:
        raise eqx_ckpt.CheckpointError(str(e)) from None
    for shout in shouts:
        for line in shout["text"].splitlines():
            say(printable(line))
    say(f"wrote {printable(output)}")
    if any(shout["unreadable"] for shout in shouts):
        return TROUBLE
    return DAMAGED if shouts else 0


def _found(path: str) -> str | eqx_ckpt.Source:
    """A run, a checkpoint, or a source of another format."""
    return path if Run(path).readable_or_not() else path_or_source(path)
