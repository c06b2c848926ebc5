"""Several managers in one directory: nobody removes what another one still needs."""

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

import eqx_ckpt
from faults import races, runs, scenarios, workloads
from faults.scenarios import Place, RunScenario, steps
from faults.shim import CHANGES, Fault
from faults.zygote import Zygote


pytestmark = pytest.mark.once


ROUNDS = 15
READ = [scenarios.KEEP_TWO, scenarios.of_databases(scenarios.KEEP_TWO)]


def test_one_of_several_managers_saves_a_step(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    scenarios.KEEP_TWO.prepare(zygote, disk / "run")
    for step in range(4, 4 + ROUNDS):
        args = str(disk / "run"), step, 2
        calls = {seed: (runs.save, (*args, seed)) for seed in (101, 102)}
        answers = zygote.call(races.at_once, calls)
        assert sorted(answers.values()) == ["exists", "saved"]
        winner = next(seed for seed in answers if answers[seed] == "saved")
        found = zygote.call(workloads.load_all, str(disk / "run"))
        assert len(found) == 2
        assert found[f"{step:06d}"] == winner
        assert not runs.hidden(str(disk / "run"))


def test_several_managers_save_a_step_each(zygote: Zygote, disk: pathlib.Path) -> None:
    scenarios.KEEP_TWO.prepare(zygote, disk / "run")
    for first in range(4, 4 + 3 * ROUNDS, 3):
        numbers = range(first, first + 3)
        calls = {s: (runs.save, (str(disk / "run"), s, 1)) for s in numbers}
        answers = zygote.call(races.at_once, calls)
        assert [*answers.values()] == ["saved"] * 3
        found = zygote.call(workloads.load_all, str(disk / "run"))
        assert found.items() <= steps(*numbers).items()
        assert f"{first + 2:06d}" in found
        assert not runs.hidden(str(disk / "run"))


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize(
    "scenario",
    [scenarios.KEEP_TWO, scenarios.REPAIR, scenarios.KEEP_ONE_DATABASES],
    ids=str,
)
def test_a_clean_up_leaves_a_live_save_alone(
    zygote: Zygote, disk: pathlib.Path, scenario: RunScenario, nth: int
) -> None:
    """A manager starts before every third operation of the save.

    If one started before all of them, it would take away each lock file between its
    creation and its lock, for ever.
    """
    scenario.prepare(zygote, disk / "run")
    args = (str(disk / "run"), scenario.step, scenario.keep, None, scenario.layout)
    first = (runs.save, args)
    second = (runs.start, (str(disk / "run"),))
    fault = Fault(str(disk), nth, "STOP", (*CHANGES, "lock"))
    error, others = zygote.call(races.overtake_often, fault, first, second, 3)
    assert error is None
    assert len(others) > 8
    assert set(others) == {None}
    assert zygote.call(workloads.load_all, str(disk / "run")) == scenario.after
    assert not runs.hidden(str(disk / "run"))


def _overtaken(
    zygote: Zygote,
    disk: pathlib.Path,
    place: Place,
    first: races.Call,
    second: races.Call,
    kinds: tuple[str, ...],
) -> Iterator[tuple[Any, Any, pathlib.Path]]:
    """Let the second call overtake the first, before each operation of the first."""
    for n, directory in place.copies(zygote, disk):
        calls = [(f, (str(directory), *args)) for f, args in (first, second)]
        fault = Fault(str(directory), n, "STOP", kinds)
        answers = zygote.call(races.overtake, fault, *calls)
        if answers is None:
            assert n > 3
            break
        yield *answers, directory


def test_a_clean_up_goes_on_behind_a_save_that_ended(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    """The clean-up has opened the lock file of a save, which then ends.

    Its name comes before those of the debris.
    """
    scenarios.DEBRIS.prepare(zygote, disk / "run")
    saving = (workloads.save, (str(disk / "run" / "000000"), 0))
    cleaning = (runs.start, (str(disk / "run"),))
    faults = [Fault(str(disk), 1, "STOP", kinds) for kinds in (("sync",), ("lock",))]
    answers = zygote.call(races.finish_first, faults[0], saving, faults[1], cleaning)
    assert answers == (None, None)
    assert not runs.hidden(str(disk / "run"))
    assert workloads.load_all(str(disk / "run")) == {
        "000000": 0,
        **scenarios.DEBRIS.before,
    }


def test_a_fork_of_a_dead_process_does_not_keep_its_save_alive(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    scenarios.KEEP_TWO.prepare(zygote, disk / "run")
    fault = Fault(str(disk), 1, kinds=("sync",))
    args = (str(disk / "run"), scenarios.KEEP_TWO.step)
    assert zygote.run(runs.save_beside_a_fork, *args, fault=fault).signal
    assert runs.hidden(str(disk / "run"))
    zygote.call(runs.start, str(disk / "run"))
    assert not runs.hidden(str(disk / "run"))


@pytest.mark.parametrize("scenario", READ, ids=str)
def test_a_reader_is_overtaken_by_retention(
    zygote: Zygote, disk: pathlib.Path, scenario: RunScenario
) -> None:
    first, second = (runs.restore, (3,)), (runs.save, (4, 1))
    reading = ("open", "read")
    for one, two, _ in _overtaken(zygote, disk, scenario, first, second, reading):
        assert two is None
        assert one == 3 or isinstance(one, eqx_ckpt.CheckpointNotFoundError)


@pytest.mark.parametrize("scenario", READ, ids=str)
def test_a_reader_of_the_newest_is_overtaken_by_retention(
    zygote: Zygote, disk: pathlib.Path, scenario: RunScenario
) -> None:
    first, second = (runs.restore, ()), (runs.save, (4, 1))
    reading = ("open", "read")
    for one, two, _ in _overtaken(zygote, disk, scenario, first, second, reading):
        assert two is None
        assert one in (3, 4), repr(one)
