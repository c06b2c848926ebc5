"""The processes of a job end alike under every schedule that is tried."""

from typing import Any

import pytest

from support import Group, process_group
from tests.scheduler import play_all

from .schedules import play


pytestmark = pytest.mark.once


FEW = range(40)


def test_each_save_has_one_outcome():
    play_all(play, FEW)


@pytest.mark.slow
def test_each_save_has_one_outcome_of_many():
    play_all(play, range(FEW.stop, 200))


def it_does_not_say_that_it_begins(monkeypatch):
    from_first = Group.from_first

    def changed(self: Group, topic: str, make: Any, *, final: bool = False, **how: Any):
        return from_first(self, topic, make, final=final and not self.is_first, **how)

    monkeypatch.setattr(Group, "from_first", changed)


def who_gives_up_keeps_to_its_own_error(monkeypatch):
    decide = Group._decide

    def changed(self: Group, topic: str, outcome: Any) -> Any:
        found = decide(self, topic, outcome)
        return outcome if "error" in outcome else found

    monkeypatch.setattr(Group, "_decide", changed)


def who_gives_up_says_that_nothing_was_saved(monkeypatch):
    monkeypatch.setattr(process_group, "_UNKNOWN", "")


@pytest.mark.parametrize(
    "defect",
    [
        it_does_not_say_that_it_begins,
        who_gives_up_keeps_to_its_own_error,
        who_gives_up_says_that_nothing_was_saved,
    ],
)
def test_a_defect_is_found(monkeypatch, defect):
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="seed"):
        play_all(play, FEW)
