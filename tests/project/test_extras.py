"""Each extra is used where it is installed, and says how to install it elsewhere."""

import sys
import tomllib
from pathlib import Path

import pytest

from project.extras import EXTRAS, is_installed, says_how_to_install


pytestmark = pytest.mark.once


def test_all_extras_are_here():
    pyproject = tomllib.loads(
        (Path(__file__).parents[2] / "pyproject.toml").read_text()
    )
    extras = pyproject["project"]["optional-dependencies"]
    assert EXTRAS.keys() == extras.keys()
    for extra, (module, _) in EXTRAS.items():
        package = module.replace(".", "-")
        assert [dep.partition(">=")[0] for dep in extras[extra]] == [package]


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_extra_says_how_to_install_it(extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = EXTRAS[extra][0]
    for name in {module, *(name for name in sys.modules if name.startswith(module))}:
        monkeypatch.setitem(sys.modules, name, None)
    assert says_how_to_install(extra)


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_enough(extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, use = EXTRAS[extra]
    if not is_installed(module):
        pytest.skip(f"{module} is not installed")
    use()
