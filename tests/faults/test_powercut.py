"""Real power cuts and read errors, on file systems in a file. Needs root."""

import errno
import pathlib
from collections.abc import Iterator

import pytest

import eqx_ckpt
from faults import powercut, runs, scenarios, workloads
from faults.powercut import PowerCut
from faults.scenarios import Death, RunScenario, Scenario
from faults.shim import Fault
from faults.zygote import Zygote


pytestmark = pytest.mark.once


SCENARIOS = [
    scenarios.BESIDE,
    scenarios.OVERWRITE,
    scenarios.OVERWRITE_DATABASE,
    scenarios.KEEP_TWO,
    scenarios.REPAIR,
    scenarios.INCREMENTAL,
]


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def power(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PowerCut]:
    directory = tmp_path_factory.mktemp("power")
    if reason := powercut.missing(request.param, directory):
        pytest.skip(reason)
    with PowerCut(request.param, directory) as power:
        yield power


@pytest.mark.parametrize("commit", [False, True], ids=["", "names are safe"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_was_acknowledged_survives(
    zygote: Zygote, power: PowerCut, scenario: Scenario | RunScenario, commit: bool
) -> None:
    directory = power.disk / f"acknowledged {scenario.name} {commit}"
    scenario.prepare(zygote, directory)
    assert scenario.perform(zygote, directory).error is None
    if commit:
        power.commit_journal()
    power.cut()
    assert zygote.call(workloads.load_all, str(directory)) == scenario.after


def test_what_was_acknowledged_in_new_directories_survives(
    zygote: Zygote, power: PowerCut
) -> None:
    path = str(power.disk / "runs" / "a" / "new")
    zygote.call(workloads.save, path, 1)
    power.cut()
    assert zygote.call(workloads.load, path) == 1


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_cut_in_the_middle_of_a_save(
    zygote: Zygote, power: PowerCut, scenario: Scenario | RunScenario
) -> None:
    """Killed and cut at places across the save, and at each step of its commit."""
    trial = power.disk / f"trial {scenario.name}"
    scenario.prepare(zygote, trial)
    count = scenario.perform(zygote, trial, Fault(str(trial))).count
    for n in [*range(1, count - 8, 9), *range(count - 8, count + 1)]:
        directory = power.disk / f"cut {scenario.name} {n}"
        scenario.prepare(zygote, directory)
        outcome = scenario.perform(zygote, directory, Fault(str(directory), n))
        if n % 2:
            power.commit_journal()
        power.cut()
        there = zygote.call(workloads.load_all, str(directory))
        allowed = scenario.outcomes if outcome.signal else [scenario.after]
        assert there in allowed, f"cut before operation {n}: {outcome.hits}"


@pytest.mark.parametrize("death", scenarios.UNSAFE_DEATHS, ids=str)
def test_a_cut_after_a_clean_up(zygote: Zygote, power: PowerCut, death: Death) -> None:
    directory = power.disk / f"clean-up {death}"
    death.scenario.prepare(zygote, directory)
    fault = Fault(str(directory), death.nth, kinds=(death.kind,))
    assert death.scenario.perform(zygote, directory, fault).signal
    zygote.call(runs.start, str(directory))
    power.commit_journal()
    power.cut()
    there = zygote.call(workloads.load_all, str(directory))
    assert there in death.scenario.outcomes
    zygote.call(runs.start, str(directory))
    assert not runs.hidden(str(directory))


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_a_disk_that_cannot_be_read(
    zygote: Zygote, tmp_path: pathlib.Path, layout: eqx_ckpt.typing.Layout
) -> None:
    """A read error is an exception: a mapped file would be the death of the process."""
    if reason := powercut.missing("ext4", tmp_path):
        pytest.skip(reason)
    with PowerCut("ext4", tmp_path) as power:
        path = str(power.disk / "new")
        zygote.call(workloads.save_megabytes, path, 8, layout)
        power.lose_data()
        outcome = zygote.run(workloads.load_megabytes, path, 8)
    assert not outcome.signal, f"dead by signal {outcome.signal}"
    assert isinstance(outcome.error, OSError), repr(outcome.error)
    assert outcome.error.errno == errno.EIO
