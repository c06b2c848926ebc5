"""README.md, the documentation and the docstrings say what is true.

Their Python snippets run as they stand, those of one text after one another. A block of
text that follows a snippet is what it prints.
"""

import contextlib
import inspect
import io
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import eqx_ckpt


pytestmark = pytest.mark.once


ROOT = Path(__file__).parents[2]
HOMES = (eqx_ckpt.inspect, eqx_ckpt.interop, eqx_ckpt.data, eqx_ckpt.recording)
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


def texts() -> Iterator[tuple[str, str]]:
    """All texts that may have snippets: where each is from, and the text."""
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        yield str(page.relative_to(ROOT)), page.read_text()
    for module in (eqx_ckpt, *HOMES):
        for name, value in vars(module).items():
            if not name.startswith("_"):
                yield name, inspect.getdoc(value) or ""


TEXTS = {source: text for source, text in texts() if any(snippets(text))}


def test_snippets_are_found():
    text = "```python\nx = 1\n```\n\n- Two.\n\n    ```python\n    print(2)\n    ```"
    assert list(snippets(text)) == [("\nx = 1\n", ""), ("\n" * 7 + "print(2)\n", "")]
    text = "```python\nprint(2)\n```\n\n```text\n2\n```"
    assert list(snippets(text)) == [("\nprint(2)\n", "2\n")]
    assert {"README.md", "tree_serialise_leaves"} <= TEXTS.keys()


@pytest.mark.parametrize("source", TEXTS)
def test_snippets_run(source, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    for library in re.findall(r"^ *(?:import|from) (\w+)", TEXTS[source], re.M):
        if library in ("blackjax", "flax", "orbax", "safetensors"):
            pytest.importorskip(library)
    if "s3://bucket" in TEXTS[source]:
        request.getfixturevalue("s3")
        request.getfixturevalue("s3_backend").make_bucket("bucket")
    run(TEXTS[source], source)


def test_the_tree_in_the_readme_is_on_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(TEXTS["README.md"], "README.md")
    files = re.findall(r"^runs/\S+", TEXTS["README.md"], re.MULTILINE)
    assert files
    assert [file for file in files if not Path(file).is_file()] == []
