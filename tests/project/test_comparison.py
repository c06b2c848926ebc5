"""Each cell of the comparison with other libraries says where it is known from."""

import re
from pathlib import Path

import pytest


pytestmark = pytest.mark.once


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/comparison.md").read_text()


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return cells[2:]


COMPARED = rows(PAGE[: PAGE.index("## What others do better")])
TESTS = {row[0]: row[1] for row in rows(PAGE[PAGE.index("## What is tested") :])}


def test_each_cell_has_a_source():
    for what, *cells in COMPARED:
        assert len(cells) == 7, what
        for cell in cells:
            is_known = re.search(r", (measured|tested)$|\]\(https://", cell)
            assert is_known or cell in ("-", "no"), (what, cell)
        assert what in TESTS or not any("tested" in cell for cell in cells), what


def test_what_is_tested_is_there():
    names = {row[0] for row in COMPARED}
    for what, files in TESTS.items():
        assert what in names
        for file in re.findall(r"`([^`]+)`", files):
            assert (ROOT / file).is_file(), file


def test_what_is_measured_is_what_the_measurement_says():
    reliability = (ROOT / "docs/reliability.md").read_text()
    table = reliability[reliability.index("## What others do under the same faults") :]
    found = {row[0]: row[1:] for row in rows(table)}
    for ours, theirs in {
        "SIGKILL during a save: loses the checkpoint before it": (
            "SIGKILL during a save: the newest acknowledged checkpoint is lost"
        ),
        "power cut after a save (ext4): loses it": (
            "power cut after a save, ext4: this checkpoint is lost"
        ),
    }.items():
        cells = next(row[1:] for row in COMPARED if row[0] == ours)
        eqx_ckpt, orbax, _, equinox, flax, safetensors = (
            cell.strip("*") for cell in found[theirs]
        )
        expected = [eqx_ckpt, equinox, orbax, flax, safetensors]
        measured = [cell for cell in cells if cell.endswith(", measured")]
        assert measured == [f"{cell}, measured" for cell in expected]
