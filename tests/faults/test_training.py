"""A training run that dies thirty times ends as one that was never interrupted."""

import itertools
import pathlib

import pytest

from faults import runs, training
from faults.zygote import Zygote


pytestmark = pytest.mark.once


KILLS = 30


@pytest.mark.slow
def test_kill_a_training_again_and_again(zygote: Zygote, disk: pathlib.Path) -> None:
    args = (str(disk / "run"), KILLS, 0)
    outcome = zygote.run(training.interrupted, *args, timeout=300)
    assert outcome.error is None
    assert not outcome.signal
    lives = outcome.value
    assert len(lives) == KILLS + 1
    saved = list(itertools.accumulate((life.saved for life in lives), max))
    for before, life in zip(saved, lives[1:], strict=False):
        # Nothing that was acknowledged is lost.
        assert life.resumed >= before or not life.steps
    assert any(life.resumed for life in lives)
    assert lives[-1].resumed > training.STEPS // 5
    assert lives[-1].end == zygote.call(training.uninterrupted)
    assert not runs.hidden(str(disk / "run"))
