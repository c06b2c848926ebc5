"""The command that writes a page."""

import eqx_ckpt

from .._steps import Run
from ._output import printable, say
from ._sources import path_or_source


def report(path: str, other: str | None, output: str, steps: int) -> int:
    source = _found(path)
    compared = None if other is None else _found(other)
    try:
        shouts = eqx_ckpt.write_report(source, output, compared, steps=steps)
    except ImportError as e:
        raise eqx_ckpt.CheckpointError(str(e)) from None
    for shout in shouts:
        for line in shout.splitlines():
            say(printable(line))
    say(f"wrote {printable(output)}")
    return 1 if shouts else 0


def _found(path: str) -> str | eqx_ckpt.Source:
    """A run, a checkpoint, or a source of another format."""
    return path if Run(path).steps() else path_or_source(path)
