"""Faulty processes at each meeting of each call: one outcome, and then all works."""

import pathlib

import pytest

from faults import crossed, jobs
from faults.zygote import OF_MANY, Zygote


_AT_ONCE = 20


@pytest.mark.parametrize(
    ("processes", "count"),
    [(2, 6), (3, 9), pytest.param(4, 9, marks=pytest.mark.slow)],
)
def test_some_faults(
    zygote: Zygote, disk: pathlib.Path, processes: int, count: int
) -> None:
    chosen = crossed.cases(processes, count, seed=processes)
    _check(zygote, disk, processes, chosen)


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_every_fault(zygote: Zygote, disk: pathlib.Path, processes: int) -> None:
    _check(zygote, disk, processes, crossed.cases(processes, None, 0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [3, 4])
def test_many_pairs(zygote: Zygote, disk: pathlib.Path, processes: int) -> None:
    _check(zygote, disk, processes, crossed.cases(processes, 60, seed=10 + processes))


def test_the_number_of_meetings(zygote: Zygote, disk: pathlib.Path) -> None:
    """No meeting of a call is left out above."""
    for found in zygote.call(jobs.values, 2, 1, crossed.count_meetings, str(disk)):
        assert found == crossed.MEETINGS


def _check(
    zygote: Zygote, disk: pathlib.Path, processes: int, chosen: list[crossed.Case]
) -> None:
    problems: list[str] = []
    for i in range(0, len(chosen), _AT_ONCE):
        some, where = chosen[i : i + _AT_ONCE], str(disk / str(i))
        call = (jobs.values, processes, 1, crossed.run, where, some)
        problems += crossed.check(some, zygote.call(*call, timeout=OF_MANY))
    assert not problems, "\n".join(problems)
