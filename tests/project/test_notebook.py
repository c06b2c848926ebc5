"""The tutorial runs as it stands, and its outputs are worth looking at."""

import html.parser
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


class Tags(html.parser.HTMLParser):
    """The names of all tags of some HTML."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)


@pytest.fixture(scope="module")
def outputs():
    """What each cell of the tutorial returns, by its first line: HTML, or text."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "docs/tutorial.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    resources = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute()
    found = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            shown = output.get("data", {})
            text = shown.get("text/html", shown.get("text/plain", output.get("text")))
            found[cell.source.splitlines()[-1]] = text
    return found


def test_a_manager_is_a_table(outputs):
    tags = Tags(outputs["manager"]).found
    assert tags.count("tr") in (3, 4)  # A head, and the steps that are kept.
    assert "400" in outputs["manager"]
    assert "loss=" in outputs["manager"]


def test_a_manifest_is_a_tree_that_unfolds(outputs):
    tags = Tags(outputs["manifest"]).found
    assert tags.count("details") == tags.count("summary") >= 4
    assert "float32[16, 2]" in outputs["manifest"]
    assert "128 B" in outputs["manifest"]


def test_the_other_outputs(outputs):
    texts = "\n".join(outputs.values())
    assert "weight  float32[16, 2]  128 B" in re.sub(r"\x1b\[\d*m", "", texts)
    assert "<td>float32[48, 2]</td>" in texts
    assert "150 draws in 3 commits" in texts
    assert "script" not in Tags(texts).found
