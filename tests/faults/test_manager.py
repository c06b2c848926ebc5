"""The manager of a run: whatever dies or fails, the run goes on where it was."""

import pathlib
import shutil
import subprocess
import sys

import pytest

from faults import runs, scenarios, workloads
from faults.failures import assert_says_why, ERRORS
from faults.runs import Struck
from faults.scenarios import RunScenario
from faults.shim import Fault
from faults.zygote import OF_MANY, Outcome, Zygote


pytestmark = pytest.mark.once


_ONLY_REMOVING_FAILED = "Step {} was saved. Removing older steps failed."
SCENARIOS = [
    scenarios.FIRST_STEP,
    scenarios.KEEP_ONE,
    scenarios.KEEP_TWO,
    scenarios.REPAIR,
    scenarios.INCREMENTAL,
    scenarios.KEEP_ONE_DATABASES,
    scenarios.REPAIR_DATABASE,
    scenarios.DELETE,
    scenarios.DELETE_DAMAGED,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_kill_at_every_operation(
    zygote: Zygote, disk: pathlib.Path, scenario: RunScenario
) -> None:
    outcomes: dict[str, Outcome] = {}
    for n, directory, outcome in scenarios.kills(scenario, zygote, disk):
        outcomes[directory] = outcome
        if n % 2:
            # The next process dies too, while it cleans up.
            zygote.run(runs.start, directory, fault=Fault(directory, n % 7))
    found = _resume_each(zygote, [*outcomes], scenario.keep)
    for outcome, resumed in zip(outcomes.values(), found, strict=True):
        where = f"killed before an operation: {outcome.hits}"
        assert resumed.found in scenario.outcomes, where
        scenarios.check_resumed(resumed, scenario.keep, where)
        assert resumed.found == scenario.after or outcome.signal
    assert len(outcomes) > 12


def _resume_each(
    zygote: Zygote, directories: list[str], keep: int
) -> list[runs.Resumed]:
    """What a fresh process finds in each directory, and leaves."""
    call = (runs.each, runs.resume, directories, keep)
    return zygote.call(*call, timeout=OF_MANY)


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
        killed: dict[str, list[str]] = {}
        for m in range(1 + n % 12, 1000, 12):
            copy = str(shutil.copytree(directory, disk / f"{n}, {m}"))
            again = zygote.run(runs.start, copy, fault=Fault(copy, m))
            killed[copy] = again.hits
            if not again.signal:
                break
        found = _resume_each(zygote, [*killed], 2)
        for hits, resumed in zip(killed.values(), found, strict=True):
            where = f"killed at {outcome.hits}, and then at {hits}"
            assert resumed.found == scenarios.DEBRIS.before, where
            scenarios.check_resumed(resumed, 2, where)
        second += len(killed)
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
        (scenarios.INCREMENTAL, "ENOSPC"),
        (scenarios.KEEP_ONE_DATABASES, "EIO"),
    ],
    ids=str,
)
def test_fail_at_every_operation(
    zygote: Zygote, disk: pathlib.Path, scenario: RunScenario, name: str, for_ever: bool
) -> None:
    fault = Fault("", 0, name, ERRORS[name], for_ever)
    strikes = scenario.strikes(zygote, disk, fault)
    for struck in strikes:
        where = f"{name} at {struck.hits[:1]}"
        _check_struck(scenario, struck, name, for_ever, where)
    # Where nothing is left over, one in five will do.
    some = [s for n, s in enumerate(strikes[::-1]) if s.debris or n % 5 == 0]
    directories = [struck.directory for struck in some]
    found = _resume_each(zygote, directories, scenario.keep)
    for struck, resumed in zip(some, found, strict=True):
        where = f"{name} at {struck.hits[:1]}"
        assert resumed.found == struck.found, where
        scenarios.check_resumed(resumed, scenario.keep, where)
    assert not strikes[-1].debris
    assert strikes[-1].found == scenario.after
    assert len(strikes) > 20


@pytest.mark.parametrize("name", ["EXDEV", "EMLINK", "EPERM", "EOPNOTSUPP"])
def test_a_file_that_cannot_be_linked_is_written(
    zygote: Zygote, disk: pathlib.Path, name: str
) -> None:
    scenario = scenarios.INCREMENTAL
    fault = Fault("", 0, name, ("link",), for_ever=True)
    *strikes, last = scenario.strikes(zygote, disk, fault)
    assert len(strikes) == 3  # A chunk, and the metadata of two arrays.
    for struck in strikes:
        assert struck.error is None
        assert struck.found == scenario.after
        (warning,) = struck.warnings
        assert "cannot be shared, and are written again" in warning
    assert not last.warnings


def _check_struck(
    scenario: RunScenario, struck: Struck, name: str, for_ever: bool, where: str
) -> None:
    error, found, debris, warnings, *_ = struck
    saved = error is None or _ONLY_REMOVING_FAILED.format(scenario.step) in getattr(
        error, "__notes__", []
    )
    if error is not None:
        assert_says_why(error, name)
        assert found in scenario.outcomes, where
    else:
        # A step that cannot be read stays, and counts for nothing; a warning says so.
        said = (
            "stays, as it cannot be read",
            "was not seen intact, and does not count",
        )
        is_unread = any(words in "".join(warnings) for words in said)
        assert found == scenario.after or is_unread, where
        assert scenario.after.items() <= found.items(), where
        assert found in scenario.outcomes, where
        assert struck.kind != "sync", f"a failed sync is no success: {where}"
    if saved:
        assert found != scenario.before, where
    elif not for_ever:
        assert found == scenario.before, where
    # What cannot be deleted stays until the next start, and so does what is not yet
    # durably removed. All else is put back as it was.
    if debris and not for_ever:
        assert saved, where
        assert struck.kind in ("unlink", "open", "sync"), where


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("name", ERRORS)
def test_fail_at_every_operation_of_a_deletion(
    zygote: Zygote, disk: pathlib.Path, name: str, for_ever: bool
) -> None:
    """A step is there, whole, or it is not; the next manager removes what is left."""
    scenario = scenarios.DELETE
    fault = Fault("", 0, name, ERRORS[name], for_ever)
    strikes = scenario.strikes(zygote, disk, fault)
    for struck in strikes:
        where = f"{name} at {struck.hits[:1]}: {struck.error!r}"
        if struck.error is None:
            assert struck.found == scenario.after, where
            assert struck.kind != "sync", f"a failed sync is no success: {where}"
            continue
        assert_says_why(struck.error, name)
        if struck.found != scenario.before:
            assert struck.found == scenario.after, where
            assert "is not known: " in "".join(struck.error.__notes__), where
    directories = [struck.directory for struck in strikes]
    found = _resume_each(zygote, directories, scenario.keep)
    for struck, resumed in zip(strikes, found, strict=True):
        assert resumed.found == struck.found
        scenarios.check_resumed(resumed, scenario.keep, f"{struck.hits[:1]}")
    assert sum(struck.error is not None for struck in strikes) > 1


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("name", ERRORS)
def test_fail_at_every_operation_of_a_clean_up(
    zygote: Zygote, disk: pathlib.Path, name: str, for_ever: bool
) -> None:
    """A run goes on in spite of that, with a warning, and the next one cleans up."""
    fault = Fault("", 0, name, ERRORS[name], for_ever)
    strikes = scenarios.DEBRIS.strikes(zygote, disk, fault)
    for struck in strikes:
        where = f"{name} at {struck.hits[:1]}"
        assert struck.error is None, where
        assert struck.found == scenarios.DEBRIS.before, where
        assert struck.warnings or not struck.debris, where
    directories = [struck.directory for struck in strikes]
    zygote.call(runs.each, runs.start, directories, timeout=OF_MANY)
    for struck in strikes:
        assert not runs.hidden(struck.directory), struck.hits[:1]
    assert not strikes[-1].warnings
    assert len(strikes) > 1


def test_a_file_system_without_locks(zygote: Zygote, disk: pathlib.Path) -> None:
    """Nobody can tell there what is dead: it stays, and all else works."""
    scenarios.DEBRIS.prepare(zygote, disk / "run")
    before = runs.hidden(str(disk / "run"))
    fault = Fault(str(disk), 1, "ENOLCK", ("lock",), for_ever=True)
    args = (runs.save, str(disk / "run"), 3, 2)
    outcome = zygote.run(runs.strike, *args, fault=fault)
    error, found, debris, warnings, *_ = outcome.value
    assert error is None
    assert found == scenarios.steps(2, 3)
    assert debris == before
    assert "Could not clean up" in "".join(warnings)
    assert "use a file system that has locks: '" in "".join(warnings)


def test_a_lock_that_cannot_be_taken(zygote: Zygote, disk: pathlib.Path) -> None:
    """Without it, another process would take the save for dead: it fails."""
    scenarios.KEEP_TWO.prepare(zygote, disk / "run")
    fault = Fault(str(disk), 1, "EIO", ("lock",))
    args = (runs.save, str(disk / "run"), scenarios.KEEP_TWO.step, 2)
    error, found, debris, *_ = zygote.run(runs.strike, *args, fault=fault).value
    assert_says_why(error, "EIO")
    assert found == scenarios.KEEP_TWO.before
    assert not debris


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
        command, env=zygote.environment, capture_output=True, text=True, timeout=300
    )
    assert "OSError: [Errno 5] Input/output error" in end.stderr
    assert "000004 failed" in end.stderr
    assert (
        zygote.call(workloads.load_all, str(disk / "run")) == scenarios.KEEP_TWO.before
    )
    assert not runs.hidden(str(disk / "run"))
