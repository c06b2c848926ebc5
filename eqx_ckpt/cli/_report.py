"""The command that writes a page."""

import eqx_ckpt

from ._output import printable, say


def report(path: str, other: str | None, output: str, steps: int) -> int:
    try:
        shouts = eqx_ckpt.write_report(path, output, other, steps=steps)
    except ImportError as e:
        raise eqx_ckpt.CheckpointError(str(e)) from None
    for shout in shouts:
        for line in shout.splitlines():
            say(printable(line))
    say(f"wrote {printable(output)}")
    return 1 if shouts else 0
