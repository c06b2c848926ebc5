"""The Python snippets of a text. `python snippets.py PAGE...` runs them.

This file needs nothing but Python: it also runs where only a wheel is installed.
"""

import contextlib
import io
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path


SNIPPET = re.compile(
    r"^( *)```python\n(.*?)^\1```\n(?:\n\1```text\n(.*?)^\1```\n)?",
    re.DOTALL | re.MULTILINE,
)


def snippets(text: str) -> Iterator[tuple[str, str]]:
    """Each snippet, moved down to its line in the text, and what it should print."""
    for match in SNIPPET.finditer(text + "\n"):
        lines_before = text.count("\n", 0, match.start(2))
        yield "\n" * lines_before + textwrap.dedent(match[2]), match[3] or ""


def run(text: str, source: str) -> None:
    """Runs the snippets of a text and compares what they print."""
    namespace = {"__name__": "__main__"}
    for snippet, expected in snippets(text):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(snippet, source, "exec"), namespace)
        if expected:
            assert printed.getvalue() == expected


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        text = page.read_text()
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            run(text, page.name)
