"""Show leaves as HTML in notebooks, and as text that fits a screen in the REPL."""

import html
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


_MOST_LINES = 20


_MOST_LEAVES = 5000


# Of a tree in a notebook; deeper names are shown whole.
_MOST_LEVELS = 50


def printable(text: str) -> str:
    """Escape what could move the cursor of a terminal, or turn a text around.

    Whatever is shown of a file goes through this, or through `escape`.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def escape(text: str) -> str:
    """A text as HTML that shows it."""
    return html.escape(printable(text))


def in_bytes(count: int) -> str:
    """A number of bytes for people to read, such as `1.5 GiB`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def first_lines(head: str, lines: Sequence[str]) -> str:
    """A head, and the first few lines below it."""
    shown = [head, *(f"  {line}" for line in lines[:_MOST_LINES])]
    if len(lines) > _MOST_LINES:
        shown.append(f"  ... and {len(lines) - _MOST_LINES} more")
    return "\n".join(map(printable, shown))


def tree_html(head: str, leaves: Mapping[str, tuple[str, int]]) -> str:
    """A tree of leaves that unfolds; each leaf has a description and a size."""
    chosen = list(leaves.items())[:_MOST_LEAVES]
    nested: dict[str, Any] = {}
    for name, leaf in chosen:
        *parents, last = name.split("/", _MOST_LEVELS)
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        # A leaf and a folder can have one name; a slash keeps their keys apart.
        node[f"{last}/"] = leaf
    left = len(leaves) - len(chosen)
    more = f"<p>... and {left} more leaves</p>" if left else ""
    summary = f"<summary>{escape(head)}</summary>"
    return f"<details open>{summary}{_list(nested)}{more}</details>"


def _list(node: Mapping[str, Any]) -> str:
    items: list[str] = []
    for name, child in node.items():
        if isinstance(child, tuple):
            text, nbytes = child
            size = f" <small>{in_bytes(nbytes)}</small>" if nbytes else ""
            items.append(
                f"<li>{escape(name[:-1])} <code>{escape(text)}</code>{size}</li>"
            )
        else:
            size = in_bytes(_nbytes(child))
            summary = f"{escape(name)} <small>{size}</small>"
            items.append(
                f"<li><details><summary>{summary}</summary>{_list(child)}</details></li>"
            )
    return f"<ul>{''.join(items)}</ul>"


def _nbytes(node: Any) -> int:
    return node[1] if isinstance(node, tuple) else sum(map(_nbytes, node.values()))


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of texts."""
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    lines = [
        f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>"
        for row in rows
    ]
    return (
        f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    )


def columns_of(text: str) -> int:
    """How many columns a text takes; characters of Chinese take two, accents none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """Align columns: the first and the last to the left, the others to the right."""
    lines = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(columns_of, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        gaps = [" " * (w - columns_of(t)) for t, w in zip(line, widths, strict=True)]
        cells = [gap + text for gap, text in zip(gaps, line, strict=True)]
        cells[0], cells[-1] = line[0] + gaps[0], line[-1]
        yield "  ".join(cells).rstrip()
