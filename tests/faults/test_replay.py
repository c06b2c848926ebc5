"""A power cut at any moment: every state of the disk that POSIX allows is restored."""

import functools
import pathlib
import shutil

import pytest

from faults import recordings, replay, runs, scenarios, toy_savers, workloads
from faults.scenarios import Death, RunScenario, Scenario
from faults.shim import Fault
from faults.zygote import Zygote


pytestmark = pytest.mark.once


@pytest.mark.parametrize("step", toy_savers.STEPS)
def test_the_explorer_sees_a_missing_step(
    zygote: Zygote, disk: pathlib.Path, step: str
) -> None:
    assert _explore_toy(zygote, disk, step).bad


def test_the_explorer_finds_nothing_in_the_textbook(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    result = _explore_toy(zygote, disk, "")
    assert result.states > 10
    assert not result.bad, str(result)


def _explore_toy(zygote: Zygote, disk: pathlib.Path, step: str) -> replay.Result:
    root, log = disk / "root", disk / "log"
    root.mkdir()
    (disk / "initial").mkdir()
    fault = Fault(str(root), log=str(log))
    outcome = zygote.run(toy_savers.save, str(root / "new"), 2, step, fault=fault)
    assert outcome.error is None
    return replay.explore(log, root, disk / "initial", disk, toy_savers.check)


SCENARIOS = [
    scenarios.FIRST,
    scenarios.BESIDE,
    scenarios.OVERWRITE,
    scenarios.AFTER_KILL,
    scenarios.OVERWRITE_DATABASE,
    scenarios.ARRAYS_OVER_DATABASE,
    scenarios.FIRST_STEP,
    scenarios.KEEP_ONE,
    pytest.param(scenarios.KEEP_TWO, marks=pytest.mark.slow),
    scenarios.REPAIR,
    scenarios.INCREMENTAL,
    scenarios.KEEP_ONE_DATABASES,
    scenarios.DELETE,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_crash_state_of_a_save(
    zygote: Zygote, disk: pathlib.Path, scenario: Scenario | RunScenario
) -> None:
    scenario.prepare(zygote, disk / "initial")
    shutil.copytree(disk / "initial", disk / "root")
    fault = Fault(str(disk / "root"), log=str(disk / "log"))
    assert scenario.perform(zygote, disk / "root", fault).error is None
    check = functools.partial(_check, scenario)
    result = replay.explore(disk / "log", disk / "root", disk / "initial", disk, check)
    assert result.states > 40
    assert not result.bad, str(result)


def _check(
    scenario: Scenario | RunScenario, directory: pathlib.Path, notes: list[str]
) -> None:
    there = workloads.load_all(str(directory))
    has_ended = not {"saved", "deleted"}.isdisjoint(notes)
    allowed = [scenario.after] if has_ended else scenario.outcomes
    assert there in allowed, f"{there} is there, and the notes are {notes}"


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.BESIDE,
        scenarios.OVERWRITE,
        scenarios.OVERWRITE_DATABASE,
        scenarios.REPAIR,
        scenarios.INCREMENTAL,
        scenarios.DELETE,
    ],
    ids=lambda scenario: scenario.name,
)
def test_every_crash_state_if_a_flush_fails(
    zygote: Zygote, disk: pathlib.Path, scenario: Scenario | RunScenario
) -> None:
    """What was renamed by then is taken back before its files are deleted."""
    check = functools.partial(_check, scenario)
    for n, root in scenario.copies(zygote, disk):
        log = disk / f"log {n}"
        fault = Fault(str(root), n, "EIO", ("sync",), log=str(log))
        outcome = scenario.perform(zygote, root, fault)
        if not outcome.hits:
            break
        result = replay.explore(log, root, disk / "scenario", disk, check)
        assert not result.bad, f"{outcome.hits}: {result}"
    assert n > 1


@pytest.mark.parametrize("death", scenarios.UNSAFE_DEATHS, ids=str)
def test_every_crash_state_of_a_clean_up(
    zygote: Zygote, disk: pathlib.Path, death: Death
) -> None:
    """A process is killed, the next one cleans up, and then the power is cut."""
    root, log = disk / "root", str(disk / "log")
    death.scenario.prepare(zygote, disk / "initial")
    shutil.copytree(disk / "initial", root)
    fault = Fault(str(root), death.nth, kinds=(death.kind,), log=log)
    assert death.scenario.perform(zygote, root, fault).signal
    outcome = zygote.run(runs.start, str(root), fault=Fault(str(root), log=log))
    assert outcome.error is None
    check = functools.partial(_check, death.scenario)
    result = replay.explore(
        disk / "log", root, disk / "initial", disk, check, since="starting"
    )
    assert result.states > 2
    assert not result.bad, str(result)


def test_every_crash_state_of_a_save_in_new_directories(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    root, log = disk / "root", disk / "log"
    root.mkdir()
    (disk / "initial").mkdir()
    path = str(root / "runs" / "a" / "new")
    outcome = zygote.run(workloads.save, path, 1, fault=Fault(str(root), log=str(log)))
    assert outcome.error is None

    def check(directory: pathlib.Path, notes: list[str]) -> None:
        there = workloads.load(directory / "runs" / "a" / "new")
        assert there in ((1,) if "saved" in notes else (None, 1)), f"{there}, {notes}"

    result = replay.explore(log, root, disk / "initial", disk, check)
    assert not result.bad, str(result)


@pytest.mark.parametrize("has_states", [True, False])
def test_every_crash_state_of_a_recording(
    zygote: Zygote, disk: pathlib.Path, has_states: bool
) -> None:
    root, log = disk / "root", disk / "log"
    root.mkdir()
    (disk / "initial").mkdir()
    record = functools.partial(recordings.record, has_states=has_states)
    fault = Fault(str(root), log=str(log))
    assert zygote.run(record, str(root / "chain"), fault=fault).error is None

    def check(directory: pathlib.Path, notes: list[str]) -> None:
        recordings.check(directory / "chain", notes, has_states=has_states)

    result = replay.explore(log, root, disk / "initial", disk, check)
    assert result.states > 40
    assert not result.bad, str(result)


@pytest.mark.parametrize(
    ("has_states", "nth", "place", "says"),
    [
        pytest.param(False, 2, "chain", "", id="of the beginning"),
        pytest.param(False, 6, "chain", "0 draws are safe", id="of the first commit"),
        pytest.param(False, 10, "chain", "5 draws are safe)", id="of a commit"),
        pytest.param(True, 5, "states", "0 draws are safe", id="of a state"),
        pytest.param(True, 8, "chain", "0 draws are safe", id="of a commit with it"),
    ],
)
def test_every_crash_state_of_a_recording_if_a_flush_fails(
    zygote: Zygote,
    disk: pathlib.Path,
    has_states: bool,
    nth: int,
    place: str,
    says: str,
) -> None:
    """Whoever records next goes on from what is there, which nothing has flushed."""
    root, log = disk / "root", disk / "log"
    root.mkdir()
    (disk / "initial").mkdir()
    record = functools.partial(recordings.record_again, has_states=has_states)
    fault = Fault(str(root), nth, "EIO", ("sync",), log=str(log))
    outcome = zygote.run(record, str(root / "chain"), fault=fault)
    assert outcome.error is None
    assert outcome.hits[0].endswith(f"/{place}")
    assert says in outcome.value

    def check(directory: pathlib.Path, notes: list[str]) -> None:
        recordings.check(directory / "chain", notes, has_states=has_states)

    result = replay.explore(log, root, disk / "initial", disk, check)
    assert not result.bad, str(result)
