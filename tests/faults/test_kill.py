"""A process that dies at any file operation of a save leaves nothing half done."""

import itertools
import pathlib

import pytest

from faults import runs, scenarios, workloads
from faults.scenarios import Scenario
from faults.shim import Fault
from faults.zygote import OF_MANY, Zygote
from versions import thinned


SCENARIOS = [
    scenarios.FIRST,
    scenarios.BESIDE,
    scenarios.OVERWRITE,
    scenarios.AFTER_KILL,
    scenarios.OVERWRITE_AFTER_KILL,
    *scenarios.OF_DATABASES,
]


@pytest.mark.once
@pytest.mark.parametrize(
    "scenario", thinned(SCENARIOS, 3), ids=lambda scenario: scenario.name
)
def test_kill_at_every_operation(
    zygote: Zygote, disk: pathlib.Path, scenario: Scenario
) -> None:
    outcomes = {d: outcome for _, d, outcome in scenarios.kills(scenario, zygote, disk)}
    args = ("new", scenarios.LATER, scenario.overwrite, scenario.layout)
    call = (runs.each, workloads.load_all_and_save, [*outcomes], *args)
    found = zygote.call(*call, timeout=OF_MANY)
    for outcome, (there, later) in zip(outcomes.values(), found, strict=True):
        where = f"killed before an operation: {outcome.hits}"
        assert there in scenario.outcomes, where
        assert later == {**scenario.before, "new": scenarios.LATER}, where
        assert there == scenario.after or outcome.signal
    # Each step of the commit was among them: the shim sees what the package calls.
    seen = {outcome.kind for outcome in outcomes.values()}
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
