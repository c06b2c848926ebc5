"""Disks of processes are lost or damaged: others and the mirror have what they had."""

import pathlib

import pytest

from faults import disk_states, jobs, lost_parts
from faults.zygote import Zygote


@pytest.mark.once
def test_what_is_left(zygote: Zygote, disk: pathlib.Path) -> None:
    """The step, if its shards are anywhere; those of others are not read elsewhere."""
    args = (2, 4, lost_parts.restore_what_is_left, str(disk))
    found = zygote.call(jobs.values, *args)
    for case in lost_parts.cases():
        is_one = len(case.lost) < 2
        is_there = case.is_mirrored or is_one and (case.is_everywhere or not case.lost)
        for process, seen in enumerate(found):
            latest, error, is_whole, reads = seen[str(case)]
            assert latest == (1 if is_there else None), case
            assert error[0] == ("" if is_there else "CheckpointNotFoundError"), (
                case,
                error,
            )
            assert is_whole == (is_there and is_one or process not in case.lost), case
            reads_there = case.lost == (0, 1) or (
                process in case.lost and not case.is_everywhere
            )
            assert (reads > 0) == (is_there and reads_there), case


@pytest.mark.once
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))]
)
def test_each_state_of_two_disks(zygote: Zygote, disk: pathlib.Path, part: int) -> None:
    """There is one answer for a step, and only what is surely absent is absent."""
    args = (2, 2, disk_states.check, str(disk), part)
    first, second = zygote.call(jobs.values, *args)
    assert first == second == [str(case) for case in disk_states.cases()][part::3]


def test_three_disks(zygote: Zygote, disk: pathlib.Path) -> None:
    """What a killed save has left on one disk hides none that two have.

    What one disk has lost, one of the two others sends, also if that was repaired.
    """
    args = (3, 2, disk_states.lose_of_three, str(disk))
    assert zygote.call(jobs.values, *args) == [((2, 2.0), ("", ""))] * 3


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 12), pytest.param(2, 60, marks=pytest.mark.slow)]
)
def test_other_shardings(
    zygote: Zygote, disk: pathlib.Path, seed: int, count: int
) -> None:
    """What the shards of a process make together is read here, the rest elsewhere."""
    args = (2, 4, lost_parts.reshard, str(disk), seed, count)
    for seen in zygote.call(jobs.values, *args):
        assert {is_here for is_here, _ in seen} == {True, False}
        assert [is_here for is_here, _ in seen] == [is_read for _, is_read in seen]


def test_different_numbers_of_devices(zygote: Zygote, disk: pathlib.Path) -> None:
    args = (2, (1, 3), lost_parts.lose_unevenly, str(disk))
    first, second = zygote.call(jobs.values, *args)
    assert first == [set(), {"rows"}, set(), set()]
    assert second == [set(), set(), set(), {"rows"}]


@pytest.mark.slow
def test_all_that_have_a_shard_send(zygote: Zygote, disk: pathlib.Path) -> None:
    """Each sends some, and nobody who lacks everything sends anything."""
    args = (4, 2, lost_parts.share_the_sending, str(disk))
    found = zygote.call(jobs.values, *args)
    for number, lost in enumerate(lost_parts.LOST_OF_FOUR):
        sends = [of_process[number][0] for of_process in found]
        assert [i for i, count in enumerate(sends) if not count] == [*lost]
        assert {of_process[number][1] for of_process in found} == {("", "")}


@pytest.mark.once
def test_damage(zygote: Zygote, disk: pathlib.Path) -> None:
    """It is an error; with a fallback, it is replaced, or the step before is read."""
    first, second = zygote.call(jobs.values, 2, 4, lost_parts.damage, str(disk))
    in_transit = first.pop("in transit"), second.pop("in transit")
    kind = "CorruptCheckpointError"
    damaged = {
        "two": ("shared/nowhere/at0.0", "shared/columns/at0.0"),
        "same": ("shared/nowhere/at0.0",) * 2,
        "same, mirrored": ("shared/nowhere/at0.0",) * 2,
        "local": ("local/numpy/at0.0", "local/key/at0"),
        "halves": ("shared/columns/at0.0", "local/halves/at4"),
        "lost half": ("local/halves/at0",) * 2,
        "lost half, mirrored": ("local/halves/at0",) * 2,
        "apart": ("shared/both/at0.0", "shared/rows/at8.0"),
        "apart, mirrored": ("shared/both/at0.0", "shared/rows/at8.0"),
        "step": ("step/c.0",) * 2,
        "manifest": ("disk of process 1: The manifest",) * 2,
        "lost": ("shared/bits/at0.0",) * 2,
    }
    falls_back = {"same": "shared/nowhere", "apart": "shared/both"}
    falls_back |= {"lost": "shared/bits", "lost half": "local/halves"}
    assert first.keys() == second.keys() == damaged.keys()
    for index, seen in enumerate((first, second)):
        for case, (raised, there, warned) in seen.items():
            assert raised[0] == kind, case
            assert f"{damaged[case][index]}" in raised[1], case
            assert "Pass `on_damage='fallback'` to replace what is" in raised[1], case
            lost = {"lost": 1, "lost half": 0, "lost half, mirrored": 0}.get(case)
            assert there == (lost != index)
            assert len(warned) == (case in falls_back), case
            for text in warned:
                assert "Step 2 is damaged, and step 1 was restored: " in text
                assert f"{falls_back[case]!r}. No other process has them" in text
    for index, seen in enumerate(in_transit):
        for (error, there), (kind, words) in zip(
            seen,
            (
                ("CorruptCheckpointError", "its part did not arrive"),
                ("CorruptCheckpointError", "of process 0, did not arrive"),
                ("CheckpointError", "what no one has thought of"),
            ),
            strict=True,
        ):
            assert error[0] == kind
            assert words in error[1]
            assert there == (index == 0)  # Nothing was accepted.


@pytest.mark.parametrize(
    ("seed", "lost"),
    [
        (29, {(0,), (1,)}),
        pytest.param(3, {(1,), (0, 1)}, marks=pytest.mark.slow),
        pytest.param(5, {(0,), (1,), (0, 1)}, marks=pytest.mark.slow),
    ],
)
def test_only_what_changed_is_written(
    zygote: Zygote, disk: pathlib.Path, seed: int, lost: set[tuple[int, ...]]
) -> None:
    args = (2, 4, lost_parts.train_incrementally, str(disk), seed)
    first, second = zygote.call(jobs.values, *args)
    assert first == second
    assert {*first} == lost


def test_a_sender_dies(zygote: Zygote, disk: pathlib.Path) -> None:
    args = (2, 4, lost_parts.die_while_sending, str(disk))
    first, second = zygote.call(jobs.run, *args)
    assert second.signal == 9
    kind, text = first.value
    assert kind == "CheckpointError"
    assert "No answer from process 1 of 2 within 5 seconds (restore()" in text
    assert "Nothing was restored" in text
    assert [path.name for path in (disk / "disk0").glob("*")] == []
