"""Faulty processes at each meeting of each call: one outcome, and then all works."""

from typing import Any, NamedTuple

import pytest

from faults import crossed, jobs
from faults.zygote import OF_MANY, Zygote
from stores import programs
from stores.place import Place


pytestmark = pytest.mark.once


_AT_ONCE = 20
# Jobs at the same time.
_JOBS = 4


class Where(NamedTuple):
    """A place, and how the processes of a job find it."""

    url: str
    names: dict[str, str]
    zygote: Zygote

    def values(self, processes: int, program: Any, *args: Any) -> list[Any]:
        call = (processes, 1, programs.at, self.names, program, *args)
        return self.zygote.call(jobs.values, *call, timeout=OF_MANY)

    def ends(self, calls: list[tuple[Any, ...]]) -> list[list[jobs.End]]:
        """Of several jobs, each of a number of processes, a program and arguments."""
        ran = [(n, 1, programs.at, self.names, *call) for n, *call in calls]
        return self.zygote.call(jobs.at_once, ran, timeout=OF_MANY)


@pytest.fixture(params=["disk", "s3"])
def where(request: pytest.FixtureRequest, zygote: Zygote) -> Where:
    if request.param == "disk":
        return Where(str(request.getfixturevalue("disk")), {}, zygote)
    place: Place = request.getfixturevalue(request.param)
    return Where(place.url, programs.environment(place), zygote)


def at(*cases: tuple[Any, ...], slow: tuple[Any, ...] = ()) -> Any:
    """The place, how many processes there are, and how many cases."""
    marked = [pytest.param(*case, marks=pytest.mark.slow) for case in slow]
    names = ("where", "processes", "count")
    return pytest.mark.parametrize(names, [*cases, *marked], indirect=["where"])


def every(*counts: int) -> Any:
    return pytest.mark.parametrize("processes", counts)


@at(("disk", 2, 6), ("disk", 3, 9), slow=(("disk", 4, 9), ("s3", 2, 4), ("s3", 3, 4)))
def test_some_faults(where: Where, processes: int, count: int) -> None:
    _check(where, processes, crossed.cases(processes, count, seed=processes))


@pytest.mark.exhaustive
@every(2, 3, 4)
def test_every_fault(where: Where, processes: int) -> None:
    _check(where, processes, crossed.cases(processes, None, 0))


@pytest.mark.exhaustive
@every(3, 4)
def test_many_pairs(where: Where, processes: int) -> None:
    _check(where, processes, crossed.cases(processes, 60, seed=10 + processes))


@at(("disk", 2, 3), slow=(("disk", 3, 4), ("disk", 4, 3), ("s3", 2, 3), ("s3", 3, 3)))
def test_some_deaths(where: Where, processes: int, count: int) -> None:
    _check_deaths(where, processes, crossed.cases(processes, count, 7, ["dies"]))


@pytest.mark.exhaustive
@every(2, 3, 4)
def test_every_death(where: Where, processes: int) -> None:
    _check_deaths(where, processes, crossed.cases(processes, None, 0, ["dies"]))


def test_the_number_of_meetings(where: Where) -> None:
    """No meeting of a call is left out above."""
    for found in where.values(2, crossed.count_meetings, where.url):
        assert found == crossed.MEETINGS


def _check(where: Where, processes: int, chosen: list[crossed.Case]) -> None:
    problems: list[str] = []
    for i in range(0, len(chosen), _AT_ONCE):
        some, url = chosen[i : i + _AT_ONCE], f"{where.url}/{i}"
        found = where.values(processes, crossed.run, url, some)
        problems += crossed.check(url, some, found)
    assert not problems, "\n".join(problems)


def _check_deaths(where: Where, processes: int, chosen: list[crossed.Case]) -> None:
    """Each in a job of its own; another job then makes the same call there."""
    problems: list[str] = []
    for i in range(0, len(chosen), _JOBS):
        some = [
            (f"{where.url}/{i + j}", c) for j, c in enumerate(chosen[i : i + _JOBS])
        ]
        calls = [(processes, crossed.end, url, case) for url, case in some]
        for (url, case), ends in zip(some, where.ends(calls), strict=True):
            problems += crossed.check_deaths(url, case, ends)
        for texts in where.values(processes, crossed.resume, some):
            problems += [text for text in texts if text]
    assert not problems, "\n".join(problems)
