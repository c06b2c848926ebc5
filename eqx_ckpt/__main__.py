"""Run the command `eqx-ckpt` as `python -m eqx_ckpt`."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        from .cli._app import run
    except ModuleNotFoundError as e:
        if e.name not in ("typer", "rich"):
            raise
        needed = "The command line needs typer: `pip install 'eqx-ckpt[cli]'`."
        print(needed, file=sys.stderr)
        return 2
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
