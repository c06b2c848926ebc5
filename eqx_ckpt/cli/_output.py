"""Print the results of commands: text for people and pipes, or JSON."""

import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from .._format.lazy import np


def say(text: str = "") -> None:
    """Print a line; in colour only to a terminal, and not if `NO_COLOR` is set."""
    typer.echo(text, color=False if os.environ.get("NO_COLOR") else None)


def say_json(value: Any) -> None:
    """Print one JSON document; NaN and infinities become strings."""
    typer.echo(json.dumps(_plain(value), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        is_date = value.dtype.kind in "mM"
        return str(value) if is_date else _plain(value.item())
    return value


def printable(text: str) -> str:
    """Escape control characters, which could move the cursor of a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def number(value: Any) -> str:
    """Format a number for a column."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float | complex) else str(value)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """Align columns: the first and the last to the left, the others to the right."""
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [text.rjust(w) for text, w in zip(line, widths, strict=True)]
        cells[0], cells[-1] = line[0].ljust(widths[0]), line[-1]
        yield "  ".join(cells).rstrip()
