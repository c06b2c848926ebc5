"""What the processes of a job pass: each argument of each function is decided."""

import inspect
import pathlib

import pytest

import eqx_ckpt
from faults import arguments, jobs
from faults.arguments import ARGUMENTS, HOW, RUNS
from faults.zygote import Zygote


PASSED_ON = {"sharding", "broadcast_replicas"}
OF_LEAVES = {"filter_spec", "is_leaf"}
# They take part in what is compared, and are not compared themselves.
NOT_TRIED = {
    ("restore_or_init", "args"),
    # Who passes `False` meets the others when the manager is made, and fails alone.
    ("CheckpointManager", "shared"),
    *(("recording.record_scan", name) for name in ("f", "recording", "init", "xs")),
    # They pass these on to `tree_deserialise_leaves`.
    *(("restore_or_init", name) for name in {*HOW, *RUNS} - PASSED_ON),
    *(("CheckpointManager.restore", name) for name in {*HOW} - PASSED_ON - OF_LEAVES),
}


@pytest.mark.parametrize("function", ARGUMENTS)
def test_each_argument_is_decided(function: str) -> None:
    found = eqx_ckpt
    for part in function.split("."):
        found = getattr(found, part)
    assert [*ARGUMENTS[function]] == [
        name for name in inspect.signature(found).parameters if name != "self"
    ]


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_one_process_passes_something_else(
    zygote: Zygote, disk: pathlib.Path, who: int
) -> None:
    """All processes say at once what differs, or none fails."""
    first, second = zygote.call(jobs.values, 2, 4, arguments.differ, str(disk), who)
    for case in first:
        function, words = case
        texts = [first[case][1], second[case][1]]
        if ARGUMENTS[function][words.split(":")[0]] != "same":
            assert texts == ["", ""], case
            continue
        assert "" not in texts, case
        assert "No answer" not in "".join(texts), case
        assert texts[0] == texts[1] or "failed: " in "".join(texts), case
    tried = {(function, words.split(":")[0]) for function, words in first}
    every = {(function, name) for function, of in ARGUMENTS.items() for name in of}
    assert tried == every - NOT_TRIED
