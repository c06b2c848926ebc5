"""A file operation that fails is reported; what was there before stays as it was."""

import functools
import itertools
import pathlib

import pytest

import eqx_ckpt
from faults import recordings, runs, scenarios, workloads
from faults.failures import assert_says_why, ERRORS
from faults.scenarios import Scenario
from faults.shim import CHANGES, Fault
from faults.zygote import Zygote
from versions import thinned


SCENARIOS = [scenarios.BESIDE, scenarios.OVERWRITE, scenarios.OVERWRITE_DATABASE]
LAYOUTS = ["zarr", "ocdbt"]


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize(
    ("scenario", "name"),
    thinned(
        [
            (scenarios.OVERWRITE_DATABASE, "EIO"),
            (scenarios.ARRAYS_OVER_DATABASE, "EIO"),
            *((scenario, name) for scenario in SCENARIOS[:2] for name in ERRORS),
        ],
        4,
    ),
    ids=str,
)
def test_fail_at_every_operation(
    zygote: Zygote, disk: pathlib.Path, scenario: Scenario, name: str, for_ever: bool
) -> None:
    fault = Fault("", 0, name, ERRORS[name], for_ever)
    strikes = scenario.strikes(zygote, disk, fault)
    for struck in strikes:
        where = f"{name} at {struck.hits[:1]}"
        if struck.error is None:
            assert struck.found == scenario.after, where
            assert struck.kind != "sync", f"a failed sync is no success: {where}"
        else:
            assert_says_why(struck.error, name)
            assert struck.found in scenario.outcomes, where
            # If it could, the package has put everything back as it was.
            if not for_ever:
                assert struck.found == scenario.before, where
                assert not struck.debris, where
    assert not strikes[-1].debris
    assert sum(struck.error is not None for struck in strikes) > 10


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_write_is_short(
    zygote: Zygote, disk: pathlib.Path, scenario: Scenario
) -> None:
    strikes = scenario.strikes(zygote, disk, Fault("", 0, "SHORT", ("write",)))
    for struck in strikes:
        assert struck.found == (scenario.before if struck.error else scenario.after)
    assert len(strikes) > 4


@pytest.mark.once
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["EIO", "EACCES", "EMFILE"])
def test_a_checkpoint_that_cannot_be_read_is_not_absent(
    zygote: Zygote, disk: pathlib.Path, name: str, layout: eqx_ckpt.typing.Layout
) -> None:
    path = str(disk / "new")
    zygote.call(workloads.save, path, 1, False, layout)
    for n in itertools.count(1):
        fault = Fault(str(disk), n, name, ("open", "read"))
        outcome = zygote.run(workloads.load, path, fault=fault)
        assert not outcome.signal
        if not outcome.hits:
            break
        assert outcome.error is not None or outcome.value == 1
        if outcome.error is not None:
            assert_says_why(outcome.error, name)
    assert n > 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reading_changes_nothing(
    zygote: Zygote, disk: pathlib.Path, layout: eqx_ckpt.typing.Layout
) -> None:
    path = str(disk / "new")
    zygote.call(workloads.save, path, 1, False, layout)
    outcome = zygote.run(workloads.load, path, fault=Fault(str(disk), kinds=CHANGES))
    assert outcome.value == 1
    assert outcome.count == 0


@pytest.mark.parametrize("scenario", SCENARIOS[1:], ids=lambda scenario: scenario.name)
def test_what_is_replaced_stays_until_its_successor_is_safe(
    zygote: Zygote, disk: pathlib.Path, scenario: Scenario
) -> None:
    """The new names cannot be made durable, nor the old ones be put back."""
    fault = Fault("", 0, "EIO", ("sync", "rename"), for_ever=True)
    strikes = scenario.strikes(zygote, disk, fault)
    directories = [struck.directory for struck in strikes]
    found = zygote.call(runs.each, workloads.load_each, directories)
    for struck, seeds in zip(strikes, found, strict=True):
        assert scenarios.BYSTANDER in seeds
        if struck.error is not None:
            assert scenarios.REPLACED in seeds, f"at {struck.hits}"
    assert len(strikes) > 3


@pytest.mark.once
@pytest.mark.parametrize(
    ("nth", "name", "chunks"), [(5, "recording.json.tmp", 0), (6, "chain", 1)]
)
def test_a_commit_of_samples_that_fails(
    zygote: Zygote, disk: pathlib.Path, nth: int, name: str, chunks: int
) -> None:
    """Its samples are deleted, unless a record that refers to them may be there."""
    path, fault = disk / "chain", Fault(str(disk), nth, "EIO", ("sync",))
    outcome = zygote.run(
        functools.partial(recordings.record, has_states=False), str(path), fault=fault
    )
    assert isinstance(outcome.error, OSError)
    assert pathlib.Path(outcome.hits[0]).name == name
    assert len([*path.glob("samples/x/c*")]) == chunks


def test_a_save_warns_of_nothing(
    disk: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    for overwrite in (False, True):
        path = disk / "new"
        eqx_ckpt.tree_serialise_leaves(path, workloads.tree(1), overwrite=overwrite)
    assert not caplog.records
