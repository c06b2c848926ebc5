"""A process that dies at any file operation of a save leaves nothing half done."""

import itertools
import pathlib

import pytest

from faults import scenarios, workloads
from faults.scenarios import Scenario
from faults.shim import Fault
from faults.zygote import Zygote


SCENARIOS = [
    scenarios.FIRST,
    scenarios.BESIDE,
    scenarios.OVERWRITE,
    scenarios.AFTER_KILL,
    scenarios.OVERWRITE_AFTER_KILL,
    *scenarios.OF_DATABASES,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_kill_at_every_operation(
    zygote: Zygote, disk: pathlib.Path, scenario: Scenario
) -> None:
    seen = set()
    for n, directory in scenario.copies(zygote, disk):
        outcome = scenario.save(zygote, directory, Fault(str(directory), n))
        assert outcome.error is None
        seen.add(outcome.kind)
        there, later = zygote.call(
            workloads.load_all_and_save,
            str(directory),
            "new",
            scenarios.LATER,
            scenario.overwrite,
            scenario.layout,
        )
        where = f"killed before operation {n}: {outcome.hits}"
        assert there in scenario.outcomes, where
        assert later == {**scenario.before, "new": scenarios.LATER}, where
        if not outcome.signal:
            assert there == scenario.after
            break
    # Each step of the commit was among them: the shim sees what the package calls.
    assert seen >= {"mkdir", "create", "write", "sync", "rename"}


def test_kill_in_a_directory_that_is_not_there_yet(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    for n in itertools.count(1):
        runs = disk / str(n) / "runs"
        path = str(runs / "a" / "new")
        outcome = zygote.run(workloads.save, path, 1, fault=Fault(str(disk), n))
        assert zygote.call(workloads.load, path) in (None, 1)
        zygote.call(workloads.save, path, 2, True)
        assert zygote.call(workloads.load, path) == 2
        if not outcome.signal:
            break
