"""The README's plots and tables say what the tables of the documentation say."""

import json
import re
import xml.etree.ElementTree as ET

import pytest

from benchmarks import readme


pytestmark = pytest.mark.once


DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
HINT = "Run `python -m benchmarks.readme`."


def test_the_tables_are_those_of_the_documentation():
    text = readme.README.read_text()
    assert readme.with_tables(text) == text, HINT


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["restore", "faults"])
def test_the_plots_are_of_the_tables_of_the_documentation(name, theme):
    data = {"restore": readme.restores, "faults": readme.faults}[name]()
    plot = readme.IMAGES / f"{name}-{theme}.svg"
    described = next(ET.parse(plot).iter(DESCRIPTION)).text
    assert described == json.dumps(data), HINT
    drawn = plot.read_text()
    for rows in data.values():
        for value in filter(None, rows.values()):
            label = f"{value:g} s" if name == "restore" else "{} of {}".format(*value)
            assert f">{label}<" in drawn, HINT


def test_the_readme_and_the_front_page_show_the_plots():
    for page, folder in (("README.md", "docs/images"), ("docs/index.md", "images")):
        text = (readme.ROOT / page).read_text()
        shown = set(re.findall(rf"[\"(]{folder}/([\w-]+\.svg)", text))
        assert shown == {plot.name for plot in readme.IMAGES.glob("*.svg")}, page


def test_each_table_has_what_it_is_made_of():
    assert set(readme.restores()) == set(readme.WORKLOADS.values())
    harm = [found for row in readme.faults().values() for found in row.values()]
    assert len(harm) == 6 * len(readme.FAULTS)
    assert all(found is None or 0 <= found[0] <= found[1] for found in harm)
    assert readme.comparison_table().count("\n") == len(readme.COMPARED) + 1
