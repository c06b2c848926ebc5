"""Processes that share a bucket are right under every schedule that is tried."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from eqx_ckpt._storage.bucket import bucket_attempt, bucket_steps, heartbeat
from eqx_ckpt._storage.bucket.bucket_steps import OrphanSweeper
from eqx_ckpt._storage.bucket.keyvalue_place import KeyValues
from eqx_ckpt._storage.bucket.publication import Publication
from stores import commits, schedules


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


def no_condition(monkeypatch):
    writing = KeyValues.writing

    def changed(self: KeyValues, key: str, value: Any, version: Any = None, **how: Any):
        return writing(self, key, value, **how)

    monkeypatch.setattr(KeyValues, "writing", changed)


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
