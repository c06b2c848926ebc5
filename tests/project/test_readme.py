"""README.md, the documentation and the docstrings say what is true.

Their Python snippets run as they stand, those of one text after one another. A block of
text that follows a snippet is what it prints.
"""

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import eqx_ckpt
from project.snippets import run, SNIPPET, snippets


pytestmark = pytest.mark.once


ROOT = Path(__file__).parents[2]
HOMES = (eqx_ckpt.inspect, eqx_ckpt.interop, eqx_ckpt.data, eqx_ckpt.recording)


def texts() -> Iterator[tuple[str, str]]:
    """All texts that may have snippets: where each is from, and the text."""
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        yield str(page.relative_to(ROOT)), page.read_text()
    for module in (eqx_ckpt, *HOMES):
        for name, value in vars(module).items():
            if not name.startswith("_"):
                yield name, inspect.getdoc(value) or ""
    yield "typing", inspect.getdoc(eqx_ckpt.typing) or ""


TEXTS = {source: text for source, text in texts() if any(snippets(text))}
RECIPES = "docs/usage/recipes.md"
# Each of them runs by itself, after the first section.
_, FIRST, *ALONE = re.split("\n## (?!Index)", TEXTS.pop(RECIPES))


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
    text = TEXTS[source]
    if importlib.util.find_spec("grain") is None:
        text = SNIPPET.sub(lambda m: "" if "import grain" in m[2] else m[0], text)
    if "s3://bucket" in TEXTS[source]:
        request.getfixturevalue("s3")
        request.getfixturevalue("s3_backend").make_bucket("bucket")
    run(text, source)


def test_the_tree_in_the_readme_is_on_disk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(TEXTS["README.md"], "README.md")
    files = re.findall(r"^runs/\S+", TEXTS["README.md"], re.MULTILINE)
    assert files
    assert [file for file in files if not Path(file).is_file()] == []


@pytest.mark.parametrize("recipe", ALONE, ids=lambda recipe: recipe.partition("\n")[0])
def test_each_recipe_runs_by_itself(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(f"{FIRST}\n{recipe}", RECIPES)
