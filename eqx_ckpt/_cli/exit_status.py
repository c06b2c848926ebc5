"""What becomes of the errors and warnings of a command: lines, and exit statuses."""

import io
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import eqx_ckpt

from .terminal import complain, to_output


DAMAGED, TROUBLE = 1, 2


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command; returns its exit status. A mistake is a line, not a traceback."""
    # Python has `None` in place of a stream that was closed before it began.
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        # What the encoding of a terminal lacks is written as `\u2502`.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning)
        warnings.showwarning = _show_warning
        try:
            status = command()
            with to_output():
                sys.stdout.flush()
            return status or 0
        except BrokenPipeError:
            # Nobody reads on; Python would complain again at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (
            eqx_ckpt.CheckpointError,
            ImportError,
            MemoryError,
            OSError,
            ValueError,
        ) as e:
            complain(e)
            return status_of(e)


def status_of(problem: Exception) -> int:
    """The exit status that an error stands for."""
    is_damage = isinstance(problem, eqx_ckpt.CorruptCheckpointError)
    return DAMAGED if is_damage else TROUBLE


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    complain(message)
