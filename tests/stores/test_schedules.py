"""Processes that share a bucket are right under every schedule that is tried."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import eqx_ckpt
from eqx_ckpt._storage.bucket import bucket_attempt, bucket_steps, heartbeat
from eqx_ckpt._storage.bucket.bucket_attempt import BucketAttempt
from eqx_ckpt._storage.bucket.bucket_steps import OrphanSweeper
from eqx_ckpt._storage.bucket.heartbeat import Heartbeat
from eqx_ckpt._storage.bucket.keyvalue_place import KeyValues
from eqx_ckpt._storage.bucket.publication import Publication
from stores import commits, schedules
from tests.stores.simulated_bucket import Request, Simulation


pytestmark = pytest.mark.once


FEW = range(60)


def play_all(play: Callable[[int], Any], seeds: Iterable[int]) -> None:
    for seed in seeds:
        play(seed)


PLAYS = [commits.play, schedules.play]


@pytest.mark.parametrize("play", PLAYS)
def test_what_happens_is_right(play):
    play_all(play, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("play", PLAYS)
def test_what_happens_is_right_of_many(play):
    play_all(play, range(FEW.stop, 500))


def test_a_step_that_is_deleted_before_its_writer_knows_of_it():
    """The answer to a commit is lost, and the step is deleted before the next try."""
    simulation = Simulation(0, 2)
    simulation.faults = {Request("write", True, 1): "lost"}
    errors: list[Exception] = []
    found: list[int | None] = []

    def process(index: int) -> None:
        if index:
            simulation.pause(5.0)
            schedules.delete(schedules.STEPS[0])
            return
        place = schedules.path(schedules.STEPS[0])
        try:
            eqx_ckpt.tree_serialise_leaves(place, schedules.tree(1))
        except eqx_ckpt.CheckpointError as e:
            errors.append(e)

    simulation.play(process)
    assert len(errors) == 1
    assert "was removed by another process" in schedules.said(errors[0])
    assert "is not known" in schedules.said(errors[0])
    simulation.play(lambda index: found.append(schedules.read(schedules.STEPS[0])))
    assert found == [None, None]


def no_condition(monkeypatch):
    writing = KeyValues.writing

    def changed(self: KeyValues, key: str, value: Any, version: Any = None, **how: Any):
        return writing(self, key, value, **how)

    monkeypatch.setattr(KeyValues, "writing", changed)


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
        a_sweeper_does_not_wait,
        a_sweeper_does_not_ask,
        data_are_deleted_first,
    ],
)
def test_a_defect_is_found(monkeypatch, defect):
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        play_all(lambda seed: [play(seed) for play in PLAYS], FEW)
