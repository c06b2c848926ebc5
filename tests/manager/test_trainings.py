"""Random trainings: nothing is lost, and nothing damaged comes back, in silence."""

import pathlib

import pytest

from .trainings import Training


@pytest.mark.parametrize("seed", range(24))
def test_with_damage(tmp_path: pathlib.Path, seed: int) -> None:
    Training(tmp_path, seed).play(40)
