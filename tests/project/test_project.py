"""The project's files say the same as one another."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import hatchling.build
import pytest


pytestmark = pytest.mark.once


ROOT = Path(__file__).parents[2]


def test_lowest_versions_are_the_lower_bounds():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    dependencies = pyproject["project"]["dependencies"]
    bounds = dict(dep.partition(";")[0].split(">=") for dep in dependencies)
    constraints = (ROOT / "tests/lowest.txt").read_text()
    lowest = dict(re.findall("^(.+)==(.+)$", constraints, re.MULTILINE))
    assert bounds == {name: lowest[name] for name in bounds}
    assert lowest["jaxlib"] == lowest["jax"]


def test_the_commands_of_the_tests_find_what_they_import():
    """They run in the root of the project, which pytest adds to."""
    commands = re.findall(r"-m (tests\.\S+)", (ROOT / "Makefile").read_text())
    assert len(commands) > 8
    mains = [f"{name}.__main__" for name in ("tests.model", "tests.fuzz")]
    modules = {*commands, *mains, "tests.fuzz.targets"}
    program = "import " + ", ".join(sorted(modules))
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_changelog_and_citation_know_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_tests_that_hold_the_promises_are_there():
    text = (ROOT / "docs/stability.md").read_text()
    named = re.findall(r"`(tests/\S+?\.py)(?:::(\w+))?`", text)
    assert len(named) > 8
    for file, test in named:
        assert f"def {test}" in (ROOT / file).read_text(), (file, test)


def test_the_index_of_recipes_is_complete():
    """Each page that shows how, and each recipe beside it, is in the one index."""
    text = (ROOT / "docs/usage/recipes.md").read_text()
    index, here = text.split("\n## What the recipes begin with\n")
    rows = re.findall(r"^\| \[.+?\]\((.*?)\) \| .+ \|$", index, re.M)
    pages = {row.partition("#")[0] for row in rows}
    for page in [*ROOT.glob("docs/usage/*.md"), *ROOT.glob("docs/migrating/*.md")]:
        name = page.name if page.parent.name == "usage" else f"../migrating/{page.name}"
        assert name in pages or name == "recipes.md", name
    heads = re.findall(r"^## (.+)$", here, re.M)
    anchors = {
        re.sub(r"[^a-z -]", "", head.lower()).replace(" ", "-") for head in heads
    }
    assert anchors == {row[1:] for row in rows if row[0] == "#"}


def test_the_tutorial_opens_without_a_clone():
    cells = json.loads((ROOT / "docs/tutorial.ipynb").read_text())["cells"]
    first = next(cell for cell in cells if cell["cell_type"] == "code")
    assert "%pip install" in "".join(first["source"])


def test_the_wheel_is_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    wheel = hatchling.build.build_wheel(str(tmp_path))
    shipped = {
        name
        for name in zipfile.ZipFile(tmp_path / wheel).namelist()
        if ".dist-info/" not in name
    }
    sources = {
        str(file.relative_to(ROOT))
        for file in ROOT.glob("eqx_ckpt/**/*.py*")
        if file.suffix in (".py", ".pyi")
    }
    assets = {str(f.relative_to(ROOT)) for f in ROOT.glob("eqx_ckpt/_report/assets/*")}
    assert "eqx_ckpt/_report/assets/page.html" in assets
    assert shipped == sources | assets | {"eqx_ckpt/py.typed"}
