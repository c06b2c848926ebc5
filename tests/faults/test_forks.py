"""A forked child neither hangs nor harms, whatever its parent is doing."""

import pytest

from . import forks
from .forks import REFUSED


def test_a_child_saves_while_its_parent_saves(zygote, disk):
    assert zygote.call(forks.save, str(disk / "run")) == (0, [1, 2])


def test_a_child_does_not_wait_for_a_save_of_its_parent(zygote, disk):
    assert zygote.call(forks.ask, str(disk / "new")) == (REFUSED, 0)


def test_a_child_reads_on(zygote, disk):
    assert zygote.call(forks.iterate, str(disk / "new")) == (0, 1)


def test_a_child_takes_rows_while_its_parent_does(zygote, disk):
    assert zygote.call(forks.take, str(disk / "data")) == (0, [0.0, 1.0])


def test_a_child_does_not_wait_for_a_thread_of_its_parent(zygote):
    assert zygote.call(forks.fetch) == (REFUSED, [0.0, 1.0])


def test_a_recording_stays_that_of_its_parent(zygote, disk):
    found = zygote.call(forks.record, str(disk / "recording"))
    assert found == ([REFUSED, REFUSED, 0], 2)


@pytest.mark.parametrize("where", ["when", "keep"])
def test_a_child_does_not_upload(zygote, disk, where):
    assert zygote.call(forks.upload, str(disk), where) == (0, [1])
