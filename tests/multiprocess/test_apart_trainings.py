"""Random trainings, a disk for each process: nothing is lost or wrong in silence."""

import pathlib

import pytest

from faults import apart_trainings, jobs
from faults.zygote import OF_MANY, Zygote


pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("processes", "seeds"),
    [(2, range(4)), pytest.param(3, range(4, 16), marks=pytest.mark.slow)],
)
def test_trainings(
    zygote: Zygote, disk: pathlib.Path, processes: int, seeds: range
) -> None:
    args = (processes, 2, apart_trainings.play, str(disk), seeds, 25)
    zygote.call(jobs.values, *args, timeout=OF_MANY)
