"""A run in two places: what is uploaded when, beside a model; and what fails."""

import contextlib
import logging
import os
import pathlib
import queue
import random
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, keep_last, Mirror, save_every_steps
from helpers import assert_same, until, wait_for_uploads
from stores import proxy
from stores.place import Place
from support import Checkpoint, Run, uploader, uploads


EVERY = 3
KEPT = 2
PATIENCE = 300.0  # seconds; longer than anything here takes


def state(step: int) -> dict[str, Any]:
    return {"b": np.full(3, step), "w": np.full((40, 50), step), "step": step}


@pytest.fixture(autouse=True)
def impatiently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "PAUSES", (0.001,))


class Gate:
    """Stops each upload of a run before it begins, and says what becomes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run: pathlib.Path) -> None:
        self._arrived: queue.Queue[int] = queue.Queue()
        self._answers: queue.Queue[Exception | None] = queue.Queue()
        real, ours = uploader.upload, str(run)

        def upload(run: Any, step: int, *others: Any) -> None:
            # A manager that another test has left behind may try again.
            if run.directory == ours:
                self._arrived.put(step)
                if (error := self._answers.get(timeout=PATIENCE)) is not None:
                    raise error
            real(run, step, *others)

        monkeypatch.setattr(uploader, "upload", upload)

    def arrives(self) -> int:
        """The step whose upload begins next."""
        return self._arrived.get(timeout=PATIENCE)

    def answer(self, error: Exception | None = None) -> None:
        self._answers.put(error)

    def is_idle(self) -> bool:
        return self._arrived.empty()


@dataclass
class Model:
    """What is where, and what is uploaded next."""

    local: set[int] = field(default_factory=set)
    there: set[int] = field(default_factory=set)
    running: int | None = None
    waiting: int | None = None
    last: int | None = None
    dropped: set[int] = field(default_factory=set)

    def begin(self) -> None:
        """A new manager looks at both places."""
        self.running = self.waiting = None
        self.last = max(self.there, default=None)
        for step in sorted(self.local):
            self.consider(step)

    def consider(self, step: int) -> None:
        is_new = self.last is None or step > self.last
        if is_new and step // EVERY > (self.last or 0) // EVERY:
            self.put(step)

    def put(self, step: int) -> None:
        if self.waiting is not None:
            self.dropped.add(self.waiting)
        self.waiting = self.last = step

    def save(self, step: int) -> None:
        self.local.add(step)
        self.consider(step)

    def retain(self) -> None:
        held = {self.running, self.waiting}
        self.local = {s for s in self.local if s in held or s == max(self.local)}

    def end(self, *, ok: bool) -> None:
        step, self.running = self.running, None
        assert step is not None
        if ok:
            self.there.add(step)
            self.there = {*sorted(self.there)[-KEPT:], step}
        elif self.waiting is None:
            self.waiting = step
        else:
            self.dropped.add(step)


class World:
    """A run and its mirror, beside the model of both."""

    def __init__(self, run: pathlib.Path, there: str, gate: Gate) -> None:
        self.run, self.there, self.gate = run, there, gate
        self.model = Model()
        self.step = 0
        self.open()

    def open(self) -> None:
        mirror = Mirror(self.there, when=save_every_steps(EVERY), keep=keep_last(KEPT))
        self.manager = CheckpointManager(self.run, keep=keep_last(1), mirror=mirror)
        # What is there is known from here on.
        self.settle(self.manager)
        self.model.begin()
        self.arrive()
        self.resume()

    def resume(self) -> None:
        """Go on from the newest step of both places."""
        there = self.model.local | self.model.there
        assert self.manager.latest() == max(there, default=None)
        if there:
            assert_same(self.manager.restore(state(0)), state(max(there)))

    @staticmethod
    def settle(manager: CheckpointManager) -> None:
        """Wait until the mirror was looked at."""
        for one in manager._mirrors._uploaders:
            until(lambda one=one: one._queue.is_listed, PATIENCE)

    def arrive(self) -> None:
        """The next upload begins, if there is one."""
        model = self.model
        if model.running is None and model.waiting is not None:
            assert self.gate.arrives() == model.waiting
            model.running, model.waiting = model.waiting, None

    def save(self, by: int) -> None:
        self.step += by
        self.model.save(self.step)
        self.manager.save(self.step, state(self.step)).result(PATIENCE)
        self.model.retain()
        self.arrive()

    def upload(self, error: Exception | None) -> None:
        if self.model.running is None:
            return
        step = self.model.running
        self.gate.answer(error)
        if error is None:
            future = self.manager.uploads()[step]
            assert future.result(PATIENCE) is None
        self.model.end(ok=error is None)
        self.arrive()
        if error is not None:
            assert self.manager.upload_error is error

    def close(self) -> None:
        self.manager.close(mirror=False)
        if self.model.running is not None:
            self.gate.answer(ConnectionError("It is closed."))
        for one in self.manager._mirrors._uploaders:
            with one._changed:
                assert one._changed.wait_for(lambda one=one: not one._threads, PATIENCE)

    def restart(self, *, loses_disk: bool) -> None:
        self.close()
        if loses_disk:
            shutil.rmtree(self.run, ignore_errors=True)
            self.model.local.clear()
        self.open()

    def check(self) -> None:
        assert set(self.manager._run.steps()) >= self.model.local
        both = self.model.local | self.model.there
        assert set(self.manager.steps()) >= both
        for step in both:
            assert self.manager.read_manifest(step).leaves["step"].value == str(step)
        assert set(self.manager.mirrored()) == self.model.there
        for step in self.model.dropped & self.manager.uploads().keys():
            error = self.manager.uploads()[step].exception(0)
            assert f"Step {step} is not uploaded" in str(error)


CALLS = "save save save save ok ok fail restart lose".split()


@pytest.mark.once
@pytest.mark.parametrize("kind", ["disk", "memory", "s3"])
@pytest.mark.parametrize("seed", range(4))
def test_random_sequences(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    seed: int,
    kind: str,
) -> None:
    there = str(tmp_path / "there")
    if kind != "disk":
        there = f"memory://{uuid.uuid4().hex}/run"
    if kind == "s3":
        there = request.getfixturevalue("s3").url
    random_ = random.Random(seed)
    world = World(tmp_path / "run", there, Gate(monkeypatch, tmp_path / "run"))
    for _ in range(30):
        what = random_.choice(CALLS)
        if what == "save":
            world.save(random_.choice([1, 1, 2, 5]))
        elif what in ("ok", "fail"):
            world.upload(None if what == "ok" else ConnectionError("By the test."))
        else:
            world.restart(loses_disk=what == "lose")
        world.check()
    world.close()
    # The mirror is an ordinary run, without the local one.
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    alone = CheckpointManager(there)
    for step in alone.steps():
        assert_same(alone.restore(state(0), step), state(step))
        assert eqx_ckpt.inspect.verify(alone._run.path(step))


@contextlib.contextmanager
def a_training(
    tmp_path: pathlib.Path, there: str, **how: Any
) -> Iterator[CheckpointManager]:
    keep = keep_last(1)
    mirror = Mirror(there, **how)
    with CheckpointManager(tmp_path / "run", keep=keep, mirror=mirror) as manager:
        yield manager


@pytest.mark.parametrize("incremental", [False, True])
def test_from_store_to_store(incremental: bool) -> None:
    """A run in one bucket has a copy in another one, and goes on from that."""
    run, there = (f"memory://{uuid.uuid4().hex}/run" for _ in range(2))

    def training() -> CheckpointManager:
        return CheckpointManager(
            run, keep=keep_last(1), mirror=Mirror(there), incremental=incremental
        )

    with training() as manager:
        for step in (1, 2):
            save(manager, step)
            manager.uploads()[step].result(PATIENCE)
        assert manager.mirrored() == [1, 2]
    assert_same(CheckpointManager(there).restore(state(0), 1), state(1))
    assert CheckpointManager(run).steps() == [2]
    CheckpointManager(run).delete(2)
    with training() as manager:
        assert_same(manager.restore(state(0)), state(2))
        save(manager, 3)
    assert CheckpointManager(run).steps() == [3]
    alone = CheckpointManager(there)
    assert alone.steps() == [1, 2, 3]
    for step in alone.steps():
        assert_same(alone.restore(state(0), step), state(step))


def here(tmp_path: pathlib.Path) -> list[int]:
    return CheckpointManager(tmp_path / "run").steps()


def save(manager: CheckpointManager, step: int) -> None:
    manager.save(step, state(step)).result(PATIENCE)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING]


def test_no_step_is_due_for_an_empty_list(tmp_path):
    there = tmp_path / "there"
    with CheckpointManager(there) as manager:
        save(manager, 2)
    mirror = Mirror(there, when=[])
    with CheckpointManager(tmp_path / "run", mirror=mirror, when=[]) as manager:
        assert not manager.should_save(3)
        wait_for_uploads(tmp_path)
        for step in (1, 3):
            save(manager, step)
    assert not manager.uploads()
    assert manager.mirrored() == [2]


def test_a_list_of_mirrors_may_be_empty(tmp_path):
    with CheckpointManager(tmp_path / "run", mirror=[]) as manager:
        save(manager, 1)
        assert manager.mirrored() == []
    with pytest.raises(TypeError, match="`mirror` is ''"):
        CheckpointManager(tmp_path / "run", mirror="")


def test_an_upload_to_two_mirrors_ends_with_the_second(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, tmp_path / "run")
    mirrors = [Mirror(tmp_path / "one"), Mirror(tmp_path / "two")]
    with CheckpointManager(tmp_path / "run", mirror=mirrors) as manager:
        # A thread that finds the step before it is told of it uploads it twice.
        wait_for_uploads(tmp_path)
        save(manager, 1)
        assert gate.arrives() == gate.arrives() == 1
        gate.answer()
        until(lambda: manager.mirrored() == [1], PATIENCE)
        future = manager.uploads()[1]
        assert not future.done()
        assert not future.cancel()
        gate.answer()
        assert future.result(PATIENCE) is None
    assert all(CheckpointManager(tmp_path / name).steps() for name in ("one", "two"))


def test_a_step_that_latest_has_found_in_the_mirror_is_not_due(
    tmp_path: pathlib.Path,
) -> None:
    mirror = Mirror(tmp_path / "there")
    every = save_every_steps(EVERY)
    with CheckpointManager(tmp_path / "run", mirror=mirror) as manager:
        save(manager, EVERY)
    shutil.rmtree(tmp_path / "run")
    with CheckpointManager(tmp_path / "run", mirror=mirror, when=every) as manager:
        assert manager.latest() == EVERY
        assert not manager.should_save(EVERY)
        assert manager.should_save(2 * EVERY)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("action", "kind"),
    [(proxy.answered(403), PermissionError), (proxy.answered(503), ConnectionError)],
)
def test_a_store_that_refuses(
    tmp_path: pathlib.Path,
    s3: Place,
    caplog: pytest.LogCaptureFixture,
    action: Callable[[proxy.Exchange], None],
    kind: type[Exception],
) -> None:
    """The training goes on, one warning says so, and in the end the newest is there."""
    s3.proxy.add(action)
    with a_training(tmp_path, s3.url) as manager:
        for step in (1, 2, 3):
            save(manager, step)
        until(lambda: manager.upload_error is not None, PATIENCE)
        assert isinstance(manager.upload_error, kind)
        assert set(here(tmp_path)) <= {1, 2, 3}
        s3.proxy.rules.clear()
        save(manager, 4)
    assert manager.mirrored()[-1] == 4
    assert manager.upload_error is None
    assert sum("the training goes on" in text for text in warnings_of(caplog)) == 1


@pytest.mark.usefixtures("impatient")
def test_nothing_waits_for_a_frozen_store(
    tmp_path: pathlib.Path, s3: Place, caplog: pytest.LogCaptureFixture
) -> None:
    s3.proxy.add(proxy.hung)
    with CheckpointManager(
        tmp_path / "run",
        keep=keep_last(1),
        mirror=Mirror(s3.url, timeout=0.01),
    ) as manager:
        for step in range(5):
            save(manager, step)
            # The step before may be next to be uploaded; no older one is held.
            assert len(here(tmp_path)) <= 2
        manager.close()
    assert any("were not uploaded: 4" in text for text in warnings_of(caplog))
    assert_same(CheckpointManager(tmp_path / "run").restore(state(0)), state(4))
    with a_training(tmp_path, str(tmp_path / "there")) as manager:
        pass
    assert manager.mirrored() == [4]


class Pieces:
    """Does something before a piece of an upload is sent."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], when: int = 1
    ) -> None:
        real, self.seen = uploader.upload, 0

        def upload(*others: Any) -> None:
            others, watch = others[:-1], others[-1]

            def watched(nbytes: int) -> None:
                self.seen += 1
                if self.seen == when:
                    act()
                watch(nbytes)

            real(*others, watched)

        monkeypatch.setattr(uploader, "upload", upload)


def test_an_upload_to_two_mirrors_fails_if_one_of_them_does(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pieces(monkeypatch, lambda: shutil.rmtree(tmp_path / "run" / "000001"))
    mirrors = [Mirror(tmp_path / "one"), Mirror(tmp_path / "two")]
    with CheckpointManager(tmp_path / "run", mirror=mirrors) as manager:
        manager.save(1, state(1)).result(PATIENCE)
        error = manager.uploads()[1].exception(PATIENCE)
        assert "cannot be uploaded" in str(error)


@pytest.mark.parametrize("is_all", [False, True])
def test_the_local_step_goes_during_its_upload(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_all: bool
) -> None:
    """Deleted by somebody else: that upload fails, and the next one does not."""
    gone = tmp_path / "run" / ("" if is_all else "000001")
    Pieces(monkeypatch, lambda: shutil.rmtree(gone))
    there = tmp_path / "there"
    with a_training(tmp_path, str(there)) as manager:
        manager.save(1, state(1)).result(PATIENCE)
        error = manager.uploads()[1].exception(PATIENCE)
        assert "cannot be uploaded" in str(error)
        assert manager.mirrored() == []
        assert not there.exists() or list(there.iterdir()) == []
        save(manager, 2)
        assert manager.uploads()[2].result(PATIENCE) is None
    assert manager.mirrored() == [2]


def test_a_damaged_step_is_not_uploaded(tmp_path: pathlib.Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        save(manager, 1)
    spoil(tmp_path / "run/000001/w/c.0.0")
    with a_training(tmp_path, str(tmp_path / "there")) as manager:
        manager.close()
        assert "checksum" in str(manager.upload_error)
    assert manager.mirrored() == []


def test_the_last_step_goes_first(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM the newest step is due, and the upload of an older one stops."""
    began, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        assert may_go_on.wait(PATIENCE)

    Pieces(monkeypatch, hold)
    when = save_every_steps(2)
    with a_training(tmp_path, str(tmp_path / "there"), when=when) as manager:
        save(manager, 2)
        assert began.wait(PATIENCE)
        manager._told = True  # As `should_save` does after SIGTERM.
        save(manager, 3)
        may_go_on.set()
        assert manager.uploads()[3].result(PATIENCE) is None
        assert "Step 2 is not uploaded" in str(manager.uploads()[2].exception(0))
    assert manager.mirrored() == [3]


@pytest.mark.parametrize("waits", [True, False])
def test_close(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """The end waits for the upload, unless it is told not to: then it is given up."""
    began, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        assert may_go_on.wait(PATIENCE)

    Pieces(monkeypatch, hold)
    there = tmp_path / "there"
    mirror = Mirror(there)
    manager = CheckpointManager(tmp_path / "run", mirror=mirror)
    save(manager, 1)
    upload = manager.uploads()[1]
    assert began.wait(PATIENCE)
    if waits:
        may_go_on.set()
    manager.close(mirror=waits)
    may_go_on.set()
    if waits:
        assert upload.result(0) is None
        assert manager.mirrored() == [1]
        return
    assert "were not uploaded: 1" in str(upload.exception(0))
    with a_training(tmp_path, str(there)) as manager:
        pass
    assert manager.mirrored() == [1]


def test_an_upload_has_a_bounded_speed_and_a_low_priority(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be given up while it waits for its turn."""
    began, priority = threading.Event(), list[int]()

    def look() -> None:
        thread = threading.get_native_id()
        priority.append(os.getpriority(os.PRIO_PROCESS, thread))
        began.set()

    Pieces(monkeypatch, look)
    halves = {"a": np.zeros(10_000, np.uint8), "b": np.ones(10_000, np.uint8)}
    mirror = Mirror(tmp_path / "there", bytes_per_second=1e5)
    with CheckpointManager(tmp_path / "run", mirror=mirror) as manager:
        start = time.monotonic()
        manager.save(1, halves)
    assert time.monotonic() - start >= 0.1
    assert manager.mirrored() == [1]
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert priority == [min(usual + uploads.NICENESS, 19)]
    began.clear()
    Pieces(monkeypatch, began.set)
    mirror = Mirror(tmp_path / "there", bytes_per_second=1e-3)
    with CheckpointManager(tmp_path / "run", mirror=mirror) as manager:
        assert_same(manager.restore(halves), halves)
        manager.save(2, halves)
        assert began.wait(PATIENCE)
        manager.close(mirror=False)
    assert manager.mirrored() == [1]


def spoil(chunk: pathlib.Path) -> None:
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)


@pytest.mark.parametrize("step", [None, 2])
def test_a_damaged_step_is_read_from_the_mirror(
    tmp_path: pathlib.Path, step: int | None
) -> None:
    there = str(tmp_path / "there")
    with CheckpointManager(tmp_path / "run", mirror=Mirror(there)) as manager:
        save(manager, 1)
        assert manager.uploads()[1].result(PATIENCE) is None
        save(manager, 2)
    assert manager.mirrored()[-1] == 2
    spoil(tmp_path / "run/000002/w/c.0.0")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError) as raised:
        manager.restore(state(0), step)
    assert f"Step 2 in {there!r} is intact" in str(raised.value)
    with pytest.warns(UserWarning, match="step 2 in '.*there' was restored"):
        found = manager.restore(state(0), step, on_damage="fallback")
    assert_same(found, state(2))
    here = tmp_path / "run/000002"
    eqx_ckpt.copy(f"{there}/000002", here, overwrite=True)
    assert_same(manager.restore(state(0), step), state(2))
    spoil(here / "w/c.0.0")
    # If it is damaged there, too, an older one is the newest.
    spoil(tmp_path / "there/000002/w/c.0.0")
    if step is None:
        with pytest.warns(UserWarning, match="step 1 was restored"):
            assert_same(manager.restore(state(0), on_damage="fallback"), state(1))
    else:
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="checksum"):
            manager.restore(state(0), step, on_damage="fallback")


def test_a_damaged_step_is_saved_again_while_it_is_uploaded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = str(tmp_path / "there")
    with CheckpointManager(tmp_path / "run", mirror=Mirror(there)) as manager:
        save(manager, 1)
        assert manager.uploads()[1].result(PATIENCE) is None
    manager = CheckpointManager(tmp_path / "run")
    manager.restore(state(0))
    save(manager, 2)
    spoil(tmp_path / "run/000002/w/c.0.0")
    gate = Gate(monkeypatch, tmp_path / "run")
    with CheckpointManager(tmp_path / "run", mirror=Mirror(there)) as manager:
        assert gate.arrives() == 2
        with pytest.warns(UserWarning, match="step 1 was restored"):
            manager.restore(state(0), on_damage="fallback")
        for step in (2, 3, 4):
            save(manager, step)
        gate.answer()
        while (step := gate.arrives()) != 4:
            gate.answer()
        gate.answer()
        assert manager.uploads()[4].result(PATIENCE) is None
        assert manager.upload_error is None
    assert manager.mirrored()[-1] == 4
    assert manager.uploads()[2].done()


def test_a_thread_that_dies_is_replaced(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    def keep(steps: Mapping[int, Any]) -> list[int]:
        if len(steps) == 1:
            raise SystemExit("A function of `keep` ends the thread.")
        return [*steps]

    mirror = Mirror(tmp_path / "there", keep=keep)
    with CheckpointManager(tmp_path / "run", mirror=mirror) as manager:
        save(manager, 1)
        until(lambda: manager.upload_error is not None, PATIENCE)
        assert isinstance(manager.upload_error, SystemExit)
        assert "A function of `keep`" in caplog.text
        save(manager, 2)
        assert manager.uploads()[2].result(PATIENCE) is None
        assert manager.upload_error is None
    assert manager.mirrored() == [1, 2]


def test_two_histories_are_never_mixed(tmp_path: pathlib.Path) -> None:
    here, there = str(tmp_path / "run"), str(tmp_path / "there")
    for place, step in ((there, 500), (here, 600)):
        with CheckpointManager(place) as manager:
            save(manager, step)
    with CheckpointManager(here, mirror=Mirror(there)) as manager:
        for ask in (manager.latest, lambda: manager.restore(state(0))):
            with pytest.raises(eqx_ckpt.CheckpointError) as raised:
                ask()
            assert f"Step 600 in {here!r}" in str(raised.value)
            assert f"step 500 in {there!r}" in str(raised.value)
            assert "another run" in str(raised.value)
            assert "delete the steps" in str(raised.value)
        manager.close()
        assert "step 500 there is of a different history" in str(manager.upload_error)
    assert manager.mirrored() == [500]


@pytest.mark.parametrize("shared", [True, False])
def test_a_training_that_goes_back_behind_the_mirror(
    tmp_path: pathlib.Path, shared: bool
) -> None:
    """Its steps are not due, as there are newer ones: still, they are not backed up."""
    here, there = tmp_path / "run", tmp_path / "there"
    mirror = Mirror(there, when=save_every_steps(10))
    with CheckpointManager(here, mirror=mirror, shared=shared) as manager:
        save(manager, 10)
        save(manager, 20)
    with CheckpointManager(here, mirror=mirror, shared=shared) as manager:
        assert_same(manager.restore(state(0), 10), state(10))
        for step in (15, 16):  # Before the mirror is listed, and after that.
            save(manager, step)
            why = f"Step {step} does not belong to the steps in {str(there)!r}: step 20"
            until(lambda why=why: why in str(manager.upload_error), PATIENCE)
    assert not {15, 16} & {*manager.mirrored()}


@pytest.mark.parametrize("shared", [True, False])
def test_the_mirror_is_asked_while_a_step_is_read_here(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """Whatever it then says: nothing newer, a newer step, or another history."""
    here, there = tmp_path / "run", tmp_path / "there"

    def opened(place: pathlib.Path) -> CheckpointManager:
        return CheckpointManager(place, mirror=Mirror(there), shared=shared)

    with opened(here) as manager:
        save(manager, 1)
    read, listed, found = threading.Event(), Run.readable_or_not, Checkpoint.read

    def list_late(run: Run) -> list[int]:
        assert str(run.directory) != str(there) or read.wait(PATIENCE)
        return listed(run)

    def tell(self: Checkpoint, *args: Any) -> Any:
        read.set()
        return found(self, *args)

    manager = opened(here)
    with monkeypatch.context() as patched:
        patched.setattr(Run, "readable_or_not", list_late)
        patched.setattr(Checkpoint, "read", tell)
        assert_same(manager.restore(state(0)), state(1))
    assert read.is_set()
    with opened(tmp_path / "other") as other:
        other.restore(state(0))
        save(other, 2)
    assert_same(manager.restore(state(0)), state(2))
    save(manager, 3)
    manager.close()
    assert manager.mirrored() == [1, 2, 3]
    history = eqx_ckpt.inspect.read_manifest(there / "000003").history
    assert history is not None
    assert [session.step for session in history.sessions[-2:]] == [1, 2]
    save(CheckpointManager(tmp_path / "elsewhere"), 4)
    shutil.rmtree(there)
    shutil.copytree(tmp_path / "elsewhere", there)
    with pytest.raises(eqx_ckpt.CheckpointError, match="Nothing was chosen"):
        manager.restore(state(0))


def test_a_second_machine_that_uploads_meanwhile(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who commits after another one finds that, and takes back what it uploaded."""
    there = str(tmp_path / "there")
    with CheckpointManager(tmp_path / "run", mirror=Mirror(there)) as manager:
        save(manager, 1)

    def act() -> None:
        with CheckpointManager(there) as other:
            save(other, 3)

    Pieces(monkeypatch, act)
    with CheckpointManager(tmp_path / "run", mirror=Mirror(there)) as manager:
        assert_same(manager.restore(state(0)), state(1))
        save(manager, 2)
        error = manager.uploads()[2].exception(PATIENCE)
        assert "step 3 there is of a different history (another start)" in str(error)
    assert manager.mirrored() == [1, 3]


def test_delete_in_both_places(tmp_path: pathlib.Path) -> None:
    there = tmp_path / "there"
    with CheckpointManager(tmp_path / "run", mirror=Mirror(there)) as manager:
        save(manager, 1)
        assert manager.uploads()[1].result(PATIENCE) is None
    shutil.rmtree(tmp_path / "run/000001")
    again = CheckpointManager(tmp_path / "run", mirror=Mirror(there))
    assert again.steps() == [1]
    again.delete(1)
    assert again.steps() == again.mirrored() == []
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        again.delete(1)
    again.close()


def test_an_older_step_is_due_after_the_newest_was_deleted(
    tmp_path: pathlib.Path,
) -> None:
    mirror = Mirror(tmp_path / "there")
    with CheckpointManager(tmp_path / "run", mirror=mirror) as manager:
        for step in (1, 3):
            save(manager, step)
            assert manager.uploads()[step].result(PATIENCE) is None
        manager.delete(3)
        save(manager, 2)
        assert manager.uploads()[2].result(PATIENCE) is None
    assert manager.mirrored() == [1, 2]


def test_another_step_of_the_same_number(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is never replaced, and what is wrong is said."""
    there = tmp_path / "there"
    with CheckpointManager(there) as other:
        save(other, 1)
    with a_training(tmp_path, str(there)) as manager:
        manager.save(1, state(7)).result(PATIENCE)
    # It was not due, as there is one; so nothing was lost, and nothing was said.
    assert_same(CheckpointManager(there).restore(state(0)), state(1))


def test_a_step_that_is_saved_while_the_run_is_listed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, saved = threading.Event(), threading.Event()
    readable = uploads.Run.readable_or_not

    def late(run: Any) -> Any:
        found = readable(run)
        uploads = threading.current_thread().name.startswith("eqx_ckpt uploads")
        if uploads and str(run.directory) == str(tmp_path / "run"):
            listed.set()
            assert saved.wait(PATIENCE)
        return found

    monkeypatch.setattr(uploads.Run, "readable_or_not", late)
    mirror = Mirror(tmp_path / "there", when=save_every_steps(1))
    with CheckpointManager(tmp_path / "run", mirror=mirror) as manager:
        assert listed.wait(PATIENCE)
        save(manager, 1)
        saved.set()
        assert manager.uploads()[1].result(PATIENCE) is None
        assert manager.mirrored() == [1]


def _await_choice() -> None:
    """Wait until it is chosen which step is restored."""
    for thread in threading.enumerate():
        if thread.name.startswith("eqx_ckpt chooses"):
            thread.join(PATIENCE)


@pytest.fixture
def behind(tmp_path: pathlib.Path) -> pathlib.Path:
    """A run whose mirror has a newer step than its directory."""
    with CheckpointManager(tmp_path / "l", mirror=Mirror(tmp_path / "m")) as manager:
        for step in (1, 2):
            manager.save(step, state(step)).result()
            assert manager.uploads()[step].result(PATIENCE) is None
    shutil.rmtree(tmp_path / "l/000002")
    return tmp_path


@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize("moment", ["opened", "read"])
def test_an_older_step_here_holds_up_no_restore(behind, monkeypatch, moment, is_down):
    """It is given up once a mirror has answered that it has a newer one, or cannot."""
    opened, listed, told = Checkpoint.__init__, Run.readable_or_not, list[str]()

    def open_late(self: Checkpoint, path: Any) -> None:
        opened(self, path)
        if moment == "opened" and str(self).endswith("l/000001'"):
            _await_choice()

    def fail(self: Run) -> list[int]:
        if is_down and str(self.directory).endswith("/m"):
            raise OSError("down")
        return listed(self)

    def progress(phase: str, leaf: str, done: int, total: int) -> None:
        told.append(leaf)
        if moment == "read":
            _await_choice()

    how = {"mirror": Mirror(behind / "m"), "progress": progress}
    with (
        CheckpointManager(behind / "l", **how) as manager,
        monkeypatch.context() as patched,
    ):
        patched.setattr(Checkpoint, "__init__", open_late)
        patched.setattr(Run, "readable_or_not", fail)
        if is_down:
            with pytest.raises(OSError, match="down"):
                manager.restore(state(0))
        else:
            assert_same(manager.restore(state(0)), state(2))
    # Each array has one chunk; then, all are placed.
    of_step_1 = 1 if moment == "read" else 0
    assert len(told) <= of_step_1 + (0 if is_down else 3), told


def test_an_error_of_a_mirror_keeps_nothing_that_was_restored(behind, monkeypatch):
    listed, read = Run.readable_or_not, list[weakref.ref[Any]]()
    is_read = threading.Event()

    def fail(self: Run) -> list[int]:
        if str(self.directory).endswith("/m"):
            assert is_read.wait(PATIENCE)
            raise OSError("down")
        return listed(self)

    def spec(f: Any, leaf: Any) -> Any:
        value = eqx_ckpt.default_deserialise_filter_spec(f, leaf)
        if isinstance(value, np.ndarray):
            read.append(weakref.ref(value))
            if len(read) == 2:
                is_read.set()
        return value

    with (
        CheckpointManager(behind / "l", mirror=Mirror(behind / "m")) as manager,
        monkeypatch.context() as patched,
    ):
        patched.setattr(Run, "readable_or_not", fail)
        with pytest.raises(OSError, match="down") as error:
            manager.restore(state(0), filter_spec=spec)
    assert len(read) == 2
    assert [ref() for ref in read] == [None, None], error


def test_two_histories_in_a_mirror(tmp_path: pathlib.Path) -> None:
    """Whoever uploaded the later one has died before it looked beside it."""
    there = tmp_path / "there"
    for name, step in ("a", 2), ("b", 1):
        with CheckpointManager(tmp_path / name) as manager:
            for earlier in range(1, step + 1):
                manager.save(earlier, state(earlier))
        shutil.copytree(tmp_path / f"{name}/{step:06}", there / f"{step:06}")
    with CheckpointManager(tmp_path / "new", mirror=Mirror(there)) as manager:
        for call in manager.latest, lambda: manager.restore(state(0)):
            with pytest.raises(eqx_ckpt.CheckpointError, match="different histories"):
                call()
        assert_same(manager.restore(state(0), step=1), state(1))


def test_a_function_of_when_that_fails(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, and the training goes on, also if it is called in a save."""

    def when(step: int, last: Any) -> bool:
        return step - last > 1  # There is no last one.

    mirror = Mirror(tmp_path / "there", when=when)
    with CheckpointManager(tmp_path / "run", mirror=mirror) as manager:
        for step in (1, 2, 3):
            save(manager, step)
        until(lambda: manager.upload_error is not None, PATIENCE)
        assert isinstance(manager.upload_error, TypeError)
    assert manager.steps() == [1, 2, 3]
    assert manager.mirrored() == []
    assert all(future.done() for future in manager.uploads().values())
    (line,) = [line for line in warnings_of(caplog) if "The upload to" in line]
    assert "the training goes on. TypeError" in line
