"""The manager of a run: whatever dies or fails, the run goes on where it was."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from faults import runs, scenarios, workloads
from faults.failures import assert_says_why, ERRORS
from faults.scenarios import RunScenario
from faults.shim import Fault
from faults.zygote import Outcome, Zygote


_ONLY_REMOVING_FAILED = "Step {} was saved. Removing older steps failed."
SCENARIOS = [
    scenarios.FIRST_STEP,
    scenarios.KEEP_ONE,
    scenarios.KEEP_TWO,
    scenarios.REPAIR,
    scenarios.KEEP_ONE_DATABASES,
    scenarios.REPAIR_DATABASE,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_kill_at_every_operation(
    zygote: Zygote, disk: pathlib.Path, scenario: RunScenario
) -> None:
    for n, directory in scenario.copies(zygote, disk):
        outcome = scenario.save(zygote, directory, Fault(str(directory), n))
        assert outcome.error is None
        if n % 2:
            # The next process dies too, while it cleans up.
            zygote.run(runs.start, str(directory), fault=Fault(str(directory), n % 7))
        resumed = zygote.call(runs.resume, str(directory), scenario.keep)
        where = f"killed before operation {n}: {outcome.hits}"
        assert resumed.found in scenario.outcomes, where
        scenarios.check_resumed(resumed, scenario.keep, where)
        if not outcome.signal:
            assert resumed.found == scenario.after
            break
    assert n > 20


@pytest.mark.slow
def test_kill_at_every_operation_of_a_clean_up(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    """And then at some of the operations of the clean-up after that."""
    second = 0
    for n, directory in scenarios.DEBRIS.copies(zygote, disk):
        outcome = zygote.run(runs.start, str(directory), fault=Fault(str(directory), n))
        assert outcome.error is None
        if not outcome.signal:
            break
        for m in range(1 + n % 12, 1000, 12):
            copy = shutil.copytree(directory, disk / "again")
            again = zygote.run(runs.start, str(copy), fault=Fault(str(copy), m))
            resumed = zygote.call(runs.resume, str(copy), 2)
            where = f"killed at {outcome.hits}, and then at {again.hits}"
            assert resumed.found == scenarios.DEBRIS.before, where
            scenarios.check_resumed(resumed, 2, where)
            shutil.rmtree(copy)
            second += 1
            if not again.signal:
                break
    assert n > 30
    assert second > 80


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize(
    ("scenario", "name"),
    [
        pytest.param(scenarios.KEEP_TWO, "EIO", marks=pytest.mark.slow),
        (scenarios.KEEP_TWO, "ENOSPC"),
        (scenarios.KEEP_TWO, "EACCES"),
        (scenarios.REPAIR, "ENOSPC"),
        (scenarios.KEEP_ONE_DATABASES, "EIO"),
    ],
    ids=str,
)
def test_fail_at_every_operation(
    zygote: Zygote, disk: pathlib.Path, scenario: RunScenario, name: str, for_ever: bool
) -> None:
    for n, directory in scenario.copies(zygote, disk):
        fault = Fault(str(directory), n, name, ERRORS[name], for_ever)
        args = (str(directory), scenario.step, scenario.keep, None, scenario.layout)
        outcome = zygote.run(runs.strike, runs.save, *args, fault=fault)
        where = f"{name} at operation {n}, {outcome.hits[:1]}"
        assert not outcome.signal, where
        _check_struck(scenario, outcome, name, for_ever, where)
        if outcome.value.debris or n % 5 == 0 or not outcome.hits:
            resumed = zygote.call(runs.resume, str(directory), scenario.keep)
            assert resumed.found == outcome.value.found, where
            scenarios.check_resumed(resumed, scenario.keep, where)
        if not outcome.hits:
            assert not outcome.value.debris
            assert outcome.value.found == scenario.after
            break
    assert n > 20


def _check_struck(
    scenario: RunScenario, outcome: Outcome, name: str, for_ever: bool, where: str
) -> None:
    error, found, debris, _ = outcome.value
    saved = error is None or _ONLY_REMOVING_FAILED.format(scenario.step) in getattr(
        error, "__notes__", []
    )
    if error is not None:
        assert_says_why(error, name)
        assert found in scenario.outcomes, where
    else:
        assert found == scenario.after, where
        assert outcome.kind != "sync", f"a failed sync is no success: {where}"
    if saved:
        assert found != scenario.before, where
    elif not for_ever:
        assert found == scenario.before, where
    # What cannot be deleted stays until the next start, and so does what is not yet
    # durably removed. All else is put back as it was.
    if debris and not for_ever:
        assert saved, where
        assert outcome.kind in ("unlink", "open", "sync"), where


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("name", ERRORS)
def test_fail_at_every_operation_of_a_clean_up(
    zygote: Zygote, disk: pathlib.Path, name: str, for_ever: bool
) -> None:
    """A run goes on in spite of that, with a warning, and the next one cleans up."""
    for n, directory in scenarios.DEBRIS.copies(zygote, disk):
        fault = Fault(str(directory), n, name, ERRORS[name], for_ever)
        outcome = zygote.run(runs.strike, runs.start, str(directory), fault=fault)
        where = f"{name} at operation {n}, {outcome.hits[:1]}"
        error, found, debris, warnings = outcome.value
        assert error is None, where
        assert found == scenarios.DEBRIS.before, where
        assert warnings or not debris, where
        zygote.call(runs.start, str(directory))
        assert not runs.hidden(str(directory)), where
        if not outcome.hits:
            assert not warnings
            break
    assert n > 1


def test_a_file_system_without_locks(zygote: Zygote, disk: pathlib.Path) -> None:
    """Nobody can tell there what is dead: it stays, and all else works."""
    scenarios.DEBRIS.prepare(zygote, disk / "run")
    before = runs.hidden(str(disk / "run"))
    fault = Fault(str(disk), 1, "ENOLCK", ("lock",), for_ever=True)
    args = (runs.save, str(disk / "run"), 3, 2)
    outcome = zygote.run(runs.strike, *args, fault=fault)
    error, found, debris, warnings = outcome.value
    assert error is None
    assert found == scenarios.steps(2, 3)
    assert debris == before
    assert "Could not clean up" in "".join(warnings)


@pytest.mark.parametrize("method", runs.METHODS)
@pytest.mark.parametrize("nth", [1, 3], ids=["saving fails", "removing fails"])
def test_a_failure_that_nobody_looked_at(
    zygote: Zygote, disk: pathlib.Path, method: str, nth: int
) -> None:
    scenario = scenarios.KEEP_TWO
    scenario.prepare(zygote, disk / "run")
    fault = Fault(str(disk), nth, "EIO", ("sync",))
    args = (str(disk / "run"), scenario.step, scenario.keep, method)
    error = zygote.call(runs.save_and_look_away, *args, fault)
    assert_says_why(error, "EIO")
    notes = "".join(error.__notes__)
    assert (_ONLY_REMOVING_FAILED.format(scenario.step) in notes) == (nth == 3)
    assert f"{scenario.step:06d} failed" in notes


_SAVE_AND_END = """
import sys
import eqx_ckpt
from faults import shim, workloads

manager = eqx_ckpt.CheckpointManager(sys.argv[1])
shim.arm(shim.Fault(sys.argv[1], 1, "EIO", ("sync",)), -1)
manager.save(4, workloads.tree(4))
"""


def test_a_failure_that_nobody_looked_at_is_shown_at_the_end(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    scenarios.KEEP_TWO.prepare(zygote, disk / "run")
    command = [sys.executable, "-c", _SAVE_AND_END, str(disk / "run")]
    end = subprocess.run(
        command, env=zygote.environment, capture_output=True, text=True, timeout=60
    )
    assert "OSError: [Errno 5] Input/output error" in end.stderr
    assert "000004 failed" in end.stderr
    assert (
        zygote.call(workloads.load_all, str(disk / "run")) == scenarios.KEEP_TWO.before
    )
    assert not runs.hidden(str(disk / "run"))
