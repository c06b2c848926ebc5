"""Processes that share a bucket are right under every schedule that is tried."""

import itertools
from collections.abc import Collection
from typing import Any

import pytest

import eqx_ckpt
from stores import appends, commits, mirrors, recordings, references, schedules
from tests.scheduler import play_all
from tests.schedules import delete, read, text_of, tree, Whole
from tests.stores.simulated_bucket import Request, Simulation
from tests.support import (
    Beside,
    Between,
    bucket_attempt,
    bucket_steps,
    bucket_writer,
    BucketAttempt,
    BucketWriter,
    Heartbeat,
    heartbeat,
    INCREMENTAL,
    KeyValues,
    MANIFEST,
    Marks,
    OrphanSweeper,
    Publication,
    RECORD,
    recording_place,
    SharedValues,
    step_upload,
    Tiers,
    WRITER_LOCK,
)


pytestmark = pytest.mark.once


FEW = range(60)


PLAYS = [
    appends.play,
    commits.play,
    mirrors.play,
    recordings.play,
    references.play,
    schedules.play,
]


@pytest.mark.parametrize("play", PLAYS)
def test_what_happens_is_right(play):
    play_all(play, range(20))


@pytest.mark.slow
@pytest.mark.parametrize("play", PLAYS)
def test_what_happens_is_right_of_many(play):
    takes_long = play in (recordings.play, references.play)
    play_all(play, range(20, 120 if takes_long else 220))


@pytest.mark.parametrize("play", PLAYS)
def test_a_seed_repeats_a_schedule(play):
    first, _, second = (play(seed).simulation.clock for seed in (1, 2, 1))
    assert first == second


def test_a_step_that_is_deleted_before_its_writer_knows_of_it():
    """The answer to a commit is lost, and the step is deleted before the next try."""
    simulation = Simulation(0, 2)
    simulation.faults = {Request("write", True, 1): "lost"}
    step = Whole.steps[0]
    errors: list[Exception] = []
    found: list[int | None] = []

    def process(index: int) -> None:
        if index:
            simulation.pause(5.0)
            delete(schedules.path, step)
            return
        try:
            eqx_ckpt.tree_serialise_leaves(schedules.path(step), tree(1))
        except eqx_ckpt.CheckpointError as e:
            errors.append(e)

    simulation.play(process)
    assert len(errors) == 1
    assert "was removed by another process" in text_of(errors[0])
    assert "is not known" in text_of(errors[0])
    simulation.play(lambda index: found.append(read(schedules.path(step))))
    assert found == [None, None]


def test_a_clean_up_whose_first_look_takes_long():
    """It waits until all that it saw has been silent for long enough."""
    simulation = Simulation(0, 1)
    key = f"run/000100/@{'0' * 32}/"
    simulation.put(f"{key}a/c.0", b"1")
    latencies = itertools.chain([5.0] * 10, itertools.repeat(0.02))
    simulation.latency = lambda: next(latencies)
    removed: dict[str, int | None] = {}

    def clean_up(_: int) -> None:
        removed.update(eqx_ckpt.inspect.garbage_collect(schedules.path()))

    simulation.play(clean_up)
    assert [*removed] == [f"s3://bucket/{key}"]
    assert not simulation.values


def no_condition(monkeypatch):
    writing = KeyValues.writing

    def changed(self: KeyValues, key: str, value: Any, version: Any = None, **how: Any):
        return writing(self, key, value, **how)

    monkeypatch.setattr(KeyValues, "writing", changed)
    monkeypatch.setattr(bucket_attempt, "_keeps_conditions", lambda *_: True)


def no_heartbeat_is_late(monkeypatch):
    monkeypatch.setattr(Heartbeat, "is_late", lambda self: False)


def nobody_looks_after_the_commit(monkeypatch):
    monkeypatch.setattr(BucketAttempt, "_check_data", lambda *_: None)


def nothing_is_taken_back(monkeypatch):
    monkeypatch.setattr(Publication, "take_back", lambda self: None)


def nothing_is_compared(monkeypatch):
    def changed(self: Publication, problem: Exception) -> bool:
        self.is_possible = False
        raise problem

    monkeypatch.setattr(Publication, "_is_there", changed)


def a_sweeper_does_not_wait(monkeypatch):
    monkeypatch.setattr(heartbeat, "ORPHANED_AFTER", 0.0)
    monkeypatch.setattr(bucket_steps, "_PAUSE", 0.1)


def a_sweeper_does_not_ask(monkeypatch):
    monkeypatch.setattr(OrphanSweeper, "_is_in_use", lambda self, prefix: False)


def data_are_deleted_first(monkeypatch):
    def remove(place: KeyValues) -> None:
        manifest = place.read("zarr.json")
        if manifest is not None:
            bucket_attempt.remove_data(place, manifest)
        place.delete(["zarr.json"])

    monkeypatch.setattr(bucket_steps, "_remove", remove)


@pytest.mark.parametrize(
    "defect",
    [
        no_condition,
        no_heartbeat_is_late,
        nobody_looks_after_the_commit,
        nothing_is_taken_back,
        nothing_is_compared,
        a_sweeper_does_not_ask,
        data_are_deleted_first,
    ],
)
def test_a_defect_is_found(monkeypatch, defect):
    defect(monkeypatch)
    plays = commits.play, schedules.play
    with pytest.raises(AssertionError, match="seed"):
        play_all(lambda seed: [play(seed) for play in plays], FEW)


def nobody_says_that_steps_refer_to_each_other(monkeypatch):
    pinned = SharedValues._pinned

    def changed(self: SharedValues, put: Any) -> Any:
        def some(place: Any, key: str, value: bytes) -> None:
            if key != INCREMENTAL:
                put(place, key, value)

        return pinned(self, some)

    monkeypatch.setattr(SharedValues, "_pinned", changed)


def what_a_manifest_refers_to_is_swept(monkeypatch):
    def changed(self: Marks, attempt: str, keys: list[str]) -> list[str]:
        return [] if attempt in self._committed else keys

    monkeypatch.setattr(Marks, "unneeded", changed)


def a_deletion_deletes_what_others_refer_to(monkeypatch):
    monkeypatch.setattr(bucket_attempt, "may_be_referred_to", lambda place: False)


def manifests_have_no_condition(monkeypatch):
    writing = KeyValues.writing

    def changed(self: KeyValues, key: str, value: Any, version: Any = None, **how: Any):
        is_commit = key == MANIFEST and value is not None
        return writing(self, key, value, None if is_commit else version, **how)

    monkeypatch.setattr(KeyValues, "writing", changed)


def two_histories_are_not_told_apart(monkeypatch):
    monkeypatch.setattr(Between, "check", lambda *_: None)


def an_upload_does_not_look_beside_it(monkeypatch):
    monkeypatch.setattr(Beside, "check", lambda *_: None)


def an_upload_does_not_look_again(monkeypatch):
    monkeypatch.setattr(step_upload, "check_still_beside", lambda *_: None)


def an_upload_is_not_taken_back(monkeypatch):
    def changed(mirror: Any, step: int, history: Any, beside: Beside) -> None:
        beside.check(step, history)

    monkeypatch.setattr(step_upload, "check_still_beside", changed)


def another_step_of_that_number_is_taken_for_it(monkeypatch):
    monkeypatch.setattr(step_upload, "is_same_step", lambda *_: True)


def the_disk_is_asked_first(monkeypatch):
    latest = Tiers.latest

    def changed(self: Tiers) -> int | None:
        here = self._runs[0].latest()
        return latest(self) if here is None else here

    monkeypatch.setattr(Tiers, "latest", changed)


def a_record_is_not_taken_over(monkeypatch):
    monkeypatch.setattr(BucketWriter, "take_over", lambda *_: None)


def records_have_no_condition(monkeypatch):
    writing = KeyValues.writing

    def changed(self: KeyValues, key: str, value: Any, version: Any = None, **how: Any):
        return writing(self, key, value, None if key == RECORD else version, **how)

    monkeypatch.setattr(KeyValues, "writing", changed)


def recorded_chunks_have_no_condition(monkeypatch):
    writing = KeyValues.writing

    def changed(self: KeyValues, key: str, value: Any, version: Any = None, **how: Any):
        is_chunk = key.startswith("samples/")
        return writing(self, key, value, None if is_chunk else version, **how)

    monkeypatch.setattr(KeyValues, "writing", changed)


def nobody_asks_for_the_lease(monkeypatch):
    monkeypatch.setattr(BucketWriter, "_check_held", lambda self: None)


def what_was_not_committed_is_deleted(monkeypatch):
    def delete_others(self: BucketWriter, folder: str, keys: Collection[str]) -> None:
        self._check_held()
        self._place.delete([key for key in self.list(folder) if key not in keys])

    monkeypatch.setattr(BucketWriter, "delete_others", delete_others)


def the_version_of_a_lease_is_read_later(monkeypatch):
    put = bucket_writer._Lease._put

    def changed(self: Any, value: bytes) -> bool:
        is_ours = put(self, value)
        self._version = self._place.read_version(WRITER_LOCK).version
        return is_ours

    monkeypatch.setattr(bucket_writer._Lease, "_put", changed)


def states_are_deleted_whoever_has_saved_them(monkeypatch):
    def forget(self: recording_place.Place) -> None:
        others = {*self.states.steps()} - {self.record.state}
        self.states.stored.remove([*others])

    monkeypatch.setattr(recording_place.Place, "_forget_states", forget)


@pytest.mark.parametrize(
    ("play", "defect", "first"),
    [
        (references.play, nobody_says_that_steps_refer_to_each_other, 0),
        (references.play, what_a_manifest_refers_to_is_swept, 0),
        (references.play, a_deletion_deletes_what_others_refer_to, 0),
        (references.play, no_heartbeat_is_late, 0),
        (references.play, nobody_looks_after_the_commit, 0),
        (references.play, nothing_is_taken_back, 0),
        (references.play, a_sweeper_does_not_wait, 5),
        (mirrors.play, manifests_have_no_condition, 40),
        (mirrors.play, two_histories_are_not_told_apart, 10),
        (mirrors.play, an_upload_does_not_look_beside_it, 0),
        (mirrors.play, an_upload_does_not_look_again, 0),
        (mirrors.play, an_upload_is_not_taken_back, 780),
        (mirrors.play, another_step_of_that_number_is_taken_for_it, 10),
        (mirrors.play, the_disk_is_asked_first, 10),
        (appends.play, a_record_is_not_taken_over, 0),
        (recordings.play, records_have_no_condition, 350),
        (recordings.play, recorded_chunks_have_no_condition, 20),
        (recordings.play, nobody_asks_for_the_lease, 0),
        (appends.play, what_was_not_committed_is_deleted, 0),
        (recordings.play, the_version_of_a_lease_is_read_later, 150),
        (recordings.play, states_are_deleted_whoever_has_saved_them, 40),
    ],
)
def test_a_defect_is_found_soon(monkeypatch, play, defect, first):
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        play_all(play, range(first, first + 10))
