"""Print the results of commands: text for people and pipes, or JSON."""

import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from .._format.display import columns_of, printable
from .._format.leaf_record import MAX_BITS, scalar_to_text
from .._lazy import np
from .._progress import Progress
from .option_words import in_options


NO_CHECKSUMS = "no checksums to compare with"


_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}


class Styled(NamedTuple):
    """A part of a line, in a style of a terminal."""

    text: str
    style: str | None


def columns() -> int | None:
    """The width of the terminal; `None` if the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def say(*parts: str | Styled, is_cropped: bool = True) -> None:
    """Print a line. All that commands print in words is printed here.

    Control characters are escaped. On a terminal, what does not fit into its width is
    left out, if `is_cropped`.
    """
    line = [
        Styled(printable(part.text), part.style)
        if isinstance(part, Styled)
        else Styled(printable(part), None)
        for part in parts
    ]
    width = columns() if is_cropped else None
    if width is not None:
        line = cropped(line, width)
    codes = _STYLES if _has_colours() else {}
    text = "".join(
        f"\x1b[{codes[style]}m{text}\x1b[0m" if style in codes else text
        for text, style in line
    )
    with to_output():
        print(text)


@contextlib.contextmanager
def to_output() -> Generator[None, None, None]:
    """Name the output in the error if it cannot be written, which is full perhaps."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        raise OSError(e.errno, e.strerror, "standard output") from None


def _has_colours() -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def say_problem(text: str) -> None:
    """Print all of a text in red: it may be wider than the terminal."""
    for line in text.split("\n"):
        say(Styled(line, "red"), is_cropped=False)


def complain(problem: object) -> None:
    """Print what is wrong, where it does not disturb the answer."""
    lines = map(printable, in_options(problem).split("\n"))
    print("eqx-ckpt: " + "\n".join(lines), file=sys.stderr)


def cropped(line: list[Styled], width: int) -> list[Styled]:
    """The beginning of a line that takes `width` columns."""
    if sum(columns_of(part.text) for part in line) <= width:
        return line
    left, shown = width - 1, list[Styled]()
    for text, style in line:
        end = 0
        for character in text:
            left -= columns_of(character)
            if left < 0:
                break
            end += 1
        shown.append(Styled(text[:end], style))
        if left < 0:
            break
    return [*shown, Styled("…", None)]


def say_json(value: Any) -> None:
    """Print one JSON document; what is no number of JSON becomes a string."""
    text = json.dumps(_plain(value), indent=2, allow_nan=False)
    # All other control characters are escaped already.
    with to_output():
        print(text.replace("\x7f", "\\u007f"))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return hex(value)
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if "numpy" in sys.modules and isinstance(value, np.generic):
        is_date = value.dtype.kind in "mM"
        return str(value) if is_date else _plain(value.item())
    return value


def number(value: Any) -> str:
    """Format a number for a column."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return scalar_to_text(value)
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)


@contextlib.contextmanager
def bar() -> Generator[Callable[[str], Progress], None, None]:
    """A function from a label to the `progress` of a function of this package.

    A bar is on terminals only, and apart from the answer.
    """
    if not sys.stderr.isatty():
        yield lambda label: False
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress as Bars,
        TextColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Bars(*columns, TransferSpeedColumn(), console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def labelled(label: str) -> Progress:
            bars.reset(task, description=escape(printable(label)), total=None)

            def report(phase: str, leaf: str, done: int, total: int) -> None:
                bars.update(task, completed=done, total=total)

            return report

        yield labelled
