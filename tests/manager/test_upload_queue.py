"""Which step is uploaded next, and what its future says: any order of events."""

import random
from collections import Counter
from concurrent.futures import Future

import pytest

from eqx_ckpt._mirroring.upload_queue import UploadQueue


STEPS = range(1, 5)


EVENTS = ["save", "save", "last", "delete", "go on", "go on", "fail"]


class World:
    """A run and its mirror, each step with the number of its content; and the queue."""

    def __init__(self, seed: int, *, fails: bool) -> None:
        self.random = random.Random(seed)
        self.fails = fails
        self.queue = UploadQueue(None)
        self.here: Counter[int] = Counter()
        self.there: dict[int, int] = {}
        self.read = 0
        self.newest: int | None = None  # Of what was uploaded.
        self.is_due = True  # Of the newest step here.
        self.found: tuple[list[int], list[int]] | None = None
        self.open: dict[Future[None], int] = {}
        self.ended: set[Future[None]] = set()
        for step in STEPS:
            if self.random.random() < 0.3:
                self.here[step] = 1
            if self.random.random() < 0.1:
                self.here[step] = self.there[step] = 1

    def event(self) -> None:
        queue = self.queue
        what = self.random.choice(EVENTS)
        if what in ("save", "last"):
            step = self.random.choice(STEPS)
            # If it is there, it was replaced; or it was listed before this says so.
            self.here[step] += self.random.random() < 0.5 or not self.here[step]
            self.is_due |= step == max(self.here)
            queue.saved(step, is_last=what == "last")
        elif what == "delete":
            self.delete(self.random.choice(STEPS))
        elif not queue.is_listed:
            if self.random.random() < 0.5:
                self.found = [*self.here], [*self.there]
            elif self.found is not None:
                queue.listed(*self.found)
                self.found = None
        elif queue.running is None:
            if (step := queue.begin()) is not None:
                self.read = self.here[step]
        elif what == "go on":
            self.upload(queue.running)
        elif self.fails:
            self.fail(queue.running)

    def delete(self, step: int) -> None:
        if step == self.queue.running:
            return  # It is being read.
        self.here.pop(step, None)
        self.there.pop(step, None)
        self.newest = None if step == self.newest else self.newest
        self.is_due = False
        self.queue.deleted(step)

    def upload(self, step: int) -> None:
        if step not in self.here:
            self.queue.ended(FileNotFoundError("It was deleted."))
            return
        # It may have been replaced before it was read, or while it was.
        found = self.random.choice([self.read, self.here[step]])
        if self.there.setdefault(step, found) == found:
            self.newest = max(step, self.newest or 0)
            self.queue.ended()
        else:
            self.queue.ended(FileExistsError("Another step is there."))

    def fail(self, step: int) -> None:
        if self.random.random() < 0.5:
            self.queue.put_back()
        else:
            self.queue.ended(ValueError("The step is damaged."))

    def check(self) -> None:
        queue = self.queue
        for step in queue.held():
            assert not queue.futures[step].done()
        for step, future in queue.futures.items():
            if future not in self.ended:
                self.open[future] = step
        for future, step in [*self.open.items()]:
            if not future.done():
                assert step in queue.held()
                assert queue.futures[step] is future
                continue
            del self.open[future]  # What it says is about now.
            self.ended.add(future)
            is_there = self.there.get(step) == self.here[step]
            if future.exception() is None:
                assert is_there
            elif not self.fails and step == self.newest:
                assert not is_there


@pytest.mark.parametrize("fails", [False, True])
def test_a_future_says_whether_what_was_saved_last_is_there(fails: bool) -> None:
    for seed in range(1000):
        world = World(seed, fails=fails)
        for _ in range(world.random.randrange(20)):
            world.event()
            world.check()
        if not world.queue.is_listed:
            world.queue.listed([*world.here], [*world.there])
        while world.queue.running is not None or world.queue.has_work():
            step = world.queue.running or world.queue.begin()
            assert step is not None
            world.read = world.here[step]
            world.upload(step)
            world.check()
        newest = max(world.here, default=None)
        is_due = newest is not None and world.is_due
        if is_due and world.there.get(newest) != world.here[newest]:
            assert isinstance(world.queue.futures[newest].exception(), Exception)


def test_a_function_of_when_that_fails_leaves_no_future_open() -> None:
    def when(step: int, last: int | None) -> bool:
        raise TypeError("There is no last one.")

    queue = UploadQueue([when])
    queue.saved(1, is_last=False)
    with pytest.raises(TypeError):
        queue.listed([1], [])
    assert isinstance(queue.futures[1].exception(0), TypeError)
    assert not queue.has_work()
