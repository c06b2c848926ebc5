"""Print the results of commands: text for people and pipes, or JSON."""

import json
import math
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from .._format.lazy import np
from .._format.leaves import MAX_BITS, scalar_to_text


_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "cyan": "36"}
_CODE = re.compile(r"(\x1b\[[0-9;]*m)")


def columns() -> int | None:
    """The width of the terminal; `None` if the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def styled(text: str, style: str) -> str:
    """A text in a colour, on terminals only, and not if `NO_COLOR` is set."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if _has_colours() else text


def _has_colours() -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def say(text: str = "") -> None:
    """Print a line; on a terminal, what does not fit into its width is left out."""
    width = columns()
    print(text if width is None else cropped(text, width))


def say_problem(text: str) -> None:
    """Print all of a text in red: it may be wider than the terminal."""
    for line in text.splitlines():
        print(styled(printable(line), "red"))


def cropped(text: str, width: int) -> str:
    """The beginning of a text that takes `width` columns, with its colours."""
    if len(text) <= width or columns_of(_CODE.sub("", text)) <= width:
        return text
    left, shown = width - 1, ""
    for part in _CODE.split(text):
        if _CODE.fullmatch(part):
            shown += part
            continue
        for character in part:
            left -= columns_of(character)
            if left < 0:
                break
            shown += character
        if left < 0:
            break
    return f"{shown}…\x1b[0m" if "\x1b" in shown else f"{shown}…"


def columns_of(text: str) -> int:
    """How many columns a text takes; characters of Chinese take two, accents none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def say_json(value: Any) -> None:
    """Print one JSON document; what is no number of JSON becomes a string."""
    print(json.dumps(_plain(value), indent=2, allow_nan=False))


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


def printable(text: str) -> str:
    """Escape control characters, which could move the cursor of a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def number(value: Any) -> str:
    """Format a number for a column."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return scalar_to_text(value)
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """Align columns: the first and the last to the left, the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(columns_of, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        gaps = [" " * (w - columns_of(t)) for t, w in zip(line, widths, strict=True)]
        cells = [gap + text for gap, text in zip(gaps, line, strict=True)]
        cells[0], cells[-1] = line[0] + gaps[0], line[-1]
        yield "  ".join(cells).rstrip()
