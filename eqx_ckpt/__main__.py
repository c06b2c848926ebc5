"""Run the command `eqx-ckpt` as `python -m eqx_ckpt`."""

import importlib.util
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        return _main(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        return 130


def _main(words: list[str]) -> int:
    if importlib.util.find_spec("typer") is None:
        needed = "The command line needs typer: `pip install 'eqx-ckpt[cli]'`."
        print(needed, file=sys.stderr)
        return 2
    from ._cli.fast_path import quickly

    status = quickly(words)
    if status is not None:
        return status
    from ._cli.commands import run

    return run(words)


if __name__ == "__main__":
    sys.exit(main())
