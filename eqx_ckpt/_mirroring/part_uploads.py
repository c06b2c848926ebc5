"""Uploads of steps of which each process of a job has its part on its own disk.

They begin with a save, or when the manager is closed: the processes have met then.
"""

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from .._distributed.joint_attempt import Together
from .._distributed.process_group import Group, Solo
from .._distributed.write_assignment import Owned
from .._errors import CheckpointError
from .._format.chunk_grid import blocks, start_of
from .._format.source import read_regions, RegionRead
from .._saving.save import Save
from .._sources.part_source import StepPart
from .._steps.run_steps import Run
from .._steps.step_removal import retain
from .._storage.calls.threads import lower_priority, start
from .._storage.calls.worker_threads import MAX_IN_FLIGHT
from .._storage.interface.chunk_bytes import Piece
from .._tree.plans.write_plan import Write, WritePlan
from .mirror import Mirror
from .step_upload import check_still_beside, LocalProblem, replaces, watched
from .upload_queue import UploadQueue
from .uploader import FINAL, LAST_PATIENCE, NICENESS, Pace, Stopped


logger = logging.getLogger("eqx_ckpt")


class PartUploads:
    """Uploads the parts of steps to one mirror, one step at a time.

    The first process decides which step; each uploads what it would have written there.

    **Attributes:**

    - `there`: the run in the mirror.
    - `error`: why the last upload has failed, or `None`.
    """

    def __init__(self, run: Run, mirror: Mirror) -> None:
        self._run = run
        self._mirror = mirror
        self.there = Run(mirror.path)
        self.error: Exception | None = None
        self._queue = UploadQueue(mirror.when)
        self._related: set[int] = set()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._pace = Pace(mirror.bytes_per_second, self._stop)
        self._turn = threading.Lock()
        self._sessions = 0
        self._is_ended = False
        _all.add(self)

    def forget(self) -> None:
        """Upload nothing, in a forked child, which does not have the thread."""
        self._changed, self._turn = threading.Condition(), threading.Lock()
        self._sessions = 0
        self._queue = UploadQueue(self._mirror.when)

    def saved(self, step: int, *, is_last: bool) -> None:
        """Note a step that was saved; on the first process."""
        with self._changed:
            self._queue.saved(step, is_last=is_last)
            if is_last or step == self._queue.running:
                self._stop.set()

    def is_ready(self) -> bool:
        """Whether there is something to upload, and nothing is uploaded now."""
        with self._changed:
            return self._sessions == 0 and self._queue.has_work()

    def begin(self, group: Group | Solo) -> None:
        """Upload what the first process says, in the background."""
        name = f"eqx_ckpt uploads to {self.there.directory}"
        thread = threading.Thread(target=self._work, args=(group,), name=name)
        thread.daemon = True
        with self._changed:
            self._sessions += 1
        if not start(thread):
            self._work(group)

    def held(self) -> set[int]:
        with self._changed:
            return self._queue.held()

    def futures(self) -> dict[int, Future[None]]:
        with self._changed:
            return dict(self._queue.futures)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for what is uploaded now, for some time at most."""
        most = self._mirror.timeout if seconds is None else seconds
        with self._changed:
            self._changed.wait_for(lambda: self._sessions == 0, most)

    def end(self) -> None:
        """Upload nothing more, and give up what is on its way."""
        with self._changed:
            left = sorted(self._queue.held())
            if left:
                steps = ", ".join(map(str, left))
                message = (
                    f"Of the steps that are due for {self.there.directory!r}, these "
                    f"were not uploaded: {steps}. The next manager of the run uploads "
                    "the newest one."
                )
                logger.warning("%s", message)
                self._queue.give_up(CheckpointError(message))
            self._is_ended = True
            self._stop.set()
        self.there.stored.end_sweeps()

    def _work(self, group: Group | Solo) -> None:
        lower_priority(NICENESS)
        try:
            # The last one of the first process has ended, and this one is about to.
            with self._turn, Together(group) as together:
                step = group.from_first("step", self._choose)
                if step is not None:
                    self._upload(together, group, step)
        except Exception as e:
            if group.is_first:  # It says so for all.
                self._failed(e)
        finally:
            with self._changed:
                self._sessions -= 1
                self._changed.notify_all()

    def _choose(self) -> int | None:
        if not self._queue.is_listed:
            there, local = self.there.readable_or_not(), self._run.readable_or_not()
            with self._changed:
                self._queue.listed(local, there)
            self.there.clean_up()
        with self._changed:
            if self._is_ended:
                return None
            self._stop.clear()
            return self._queue.begin()

    def _upload(self, together: Together, group: Group | Solo, step: int) -> None:
        part = agreed_part(group, self._run, step)

        def look() -> bool | None:
            return replaces(self._run, step, part.manifest, self.there, self._related)

        overwrite = group.from_first("there", look)
        if overwrite is not None:
            save = _copying(part, self.there, step)
            save.begin(together, overwrite)
            save.send_at_most(MAX_IN_FLIGHT)
            save.run(watched(pieces_of_part(part, save.arrays), self._watch))
        group.from_first("beside", lambda: self._ended(step, part))
        self.error = None

    def _ended(self, step: int, part: StepPart) -> None:
        history = part.manifest.history
        check_still_beside(self.there, step, history, self._related)
        try:
            retain(self.there, self._mirror.keep, set(), step, self._go_on)
            self.there.clean_up()
        finally:
            with self._changed:
                if self._queue.running is not None:  # The manager may be closed.
                    self._queue.ended()

    def _go_on(self) -> None:
        if self._stop.is_set():
            raise Stopped

    def _watch(self, nbytes: int) -> None:
        self._go_on()
        self._pace.wait(nbytes)
        self._go_on()

    def _failed(self, error: Exception) -> None:
        may_succeed = isinstance(error, OSError | CheckpointError | Stopped)
        with self._changed:
            if self._queue.running is None:
                pass
            elif may_succeed and not isinstance(error, FINAL):
                self._queue.put_back()
            else:
                self._queue.ended(error)
        if isinstance(error, Stopped):
            return
        if self.error is None:
            logger.warning(
                "The upload to %s failed; the training goes on. %s: %s",
                self.there.directory,
                type(error).__name__,
                str(error),
            )
        self.error = error


_all: "weakref.WeakSet[PartUploads]" = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    for uploads in list(_all):
        uploads.end()
    for uploads in list(_all):
        uploads.wait(LAST_PATIENCE)


def _forget() -> None:
    for uploads in list(_all):
        uploads.forget()


os.register_at_fork(after_in_child=_forget)


def agreed_part(group: Group | Solo, run: Run, step: int) -> StepPart:
    """The part of this process; raise on all unless all have one of the same save."""
    part = problem = None
    try:
        part = StepPart(run.location(step))
    except (CheckpointError, OSError) as e:
        problem = str(e)
    said = group.gather("part", [part and part.part.id, problem])
    for index, (id, why) in enumerate(said):
        if part is None or why or id != said[0][0]:
            raise LocalProblem(
                f"Step {step} cannot be uploaded. Process {index}: "
                f"{why or 'its part is of another save.'}"
            )
    assert part is not None
    return part


def _copying(part: StepPart, there: Run, step: int) -> Save:
    whole = part.manifest
    writes = [
        Write(
            name,
            record,
            Owned(record, part.owned.get(name, ())) if record.is_array else None,
        )
        for name, record in whole.leaves.items()
    ]
    unsaved = dict(whole.unsaved)
    plan = WritePlan(writes, unsaved, whole.separators, whole.history)
    return Save(there.path(step), plan, None, whole.metadata, whole.layout, False)


def pieces_of_part(part: StepPart, writes: Sequence[Write]) -> Iterator[Piece]:
    """What this process uploads, in the pieces that it would have saved there."""
    for name, record, _, owned in writes:
        for region, _ in part.shards.get(name, ()):
            for piece in blocks(region, record.chunk_shape, record.itemsize):
                if owned is not None and start_of(piece) not in owned:
                    continue
                read = part.find(RegionRead(name, record, piece))
                assert read is not None
                (array,) = read_regions(part.checkpoint, [read])
                if array.size:
                    yield Piece(name, record, piece, array)
