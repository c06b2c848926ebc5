"""Uploads of steps of which each process of a job has its part on its own disk.

They begin with a save, or when the manager is closed: the processes have met then.
"""

import functools as ft
import threading
from collections.abc import Iterator, Sequence

from .._distributed.joint_attempt import Together
from .._distributed.process_group import Group, Solo
from .._distributed.write_assignment import Held
from .._errors import CheckpointError
from .._format.chunk_grid import blocks, start_of
from .._format.source import read_regions, RegionRead
from .._saving.save import Save
from .._sources.part_source import StepPart
from .._steps.run_steps import Run
from .._steps.step_before import StepBefore
from .._storage.calls.worker_threads import MAX_IN_FLIGHT
from .._storage.interface.chunk_bytes import Piece
from .._tree.plans.write_plan import Write, WritePlan
from .mirror import Mirror
from .step_upload import (
    check_still_beside,
    LocalProblem,
    sharing,
    state_there,
    watched,
)
from .uploads import Uploads


class PartUploads(Uploads):
    """Uploads what each process has of a step, with all of them.

    The first process decides which step; each uploads what it would have written there.
    """

    def __init__(self, run: Run, mirror: Mirror, incremental: bool) -> None:
        super().__init__(run, mirror)
        self._before = StepBefore(self.there) if incremental else None
        self._turn = threading.Lock()

    def is_ready(self) -> bool:
        """Whether there is something to upload, and nothing is uploaded now.

        A thread whose step is in the mirror may be about to end: the next one waits.
        """
        with self._changed:
            return self._queue.running is None and self._has_work()

    def begin(self, group: Group | Solo) -> None:
        """Upload what the first process says, in the background."""
        if not self._start(lambda: self._work(group)):
            self._work(group)

    def _work(self, group: Group | Solo) -> None:
        try:
            # The last one of the first process has ended, and this one is about to.
            with self._turn, Together(group) as together:
                step = group.from_first("step", self._next)
                if step is not None:
                    self._upload(together, group, step)
            if step is not None and group.is_first:
                self._uploaded(step)  # The others do not wait for what this removes.
        except Exception as e:
            if group.is_first:  # It says so for all.
                self._failed(e)
        self._rest()

    def _upload(self, together: Together, group: Group | Solo, step: int) -> None:
        part = agreed_part(group, self._run, step)
        history = part.manifest.history

        def look() -> bool | None:
            """Whether its copy there is intact; `None` if there is none."""
            found = state_there(self._run, step, part.manifest, self.there)
            if found is None:
                self._beside.check(step, history)
            return found

        is_intact = group.from_first("there", look)
        if not is_intact:
            save = _copying(part, self.there, step)
            save.before_commit = self._configs.put
            if before := sharing(self._before, part.manifest):
                newest = ft.partial(self.there.newest, {step})
                save.share(before.find(group.from_first("base", newest)))
            save.begin(together, is_intact is not None)
            save.send_at_most(MAX_IN_FLIGHT)
            save.run(watched(pieces_of_part(part, save.arrays), self._watch))
            if self._before and save.bases:
                self._before.remember(step, save.bases[1])
        check = ft.partial(check_still_beside, self.there, step, history, self._beside)
        group.from_first("beside", check)


def agreed_part(group: Group | Solo, run: Run, step: int) -> StepPart:
    """The part of this process; raise on all unless all have one of the same save."""
    part = problem = None
    try:
        part = StepPart(run.location(step))
    except (CheckpointError, OSError) as e:
        problem = str(e)

    def check(said: Sequence[Sequence[str | None]]) -> None:
        for index, (id, why) in enumerate(said):
            if why or id != said[0][0]:
                raise LocalProblem(
                    f"Step {step} cannot be uploaded. Process {index}: "
                    f"{why or 'its part is of another save.'}"
                )

    group.combine("part", [part and part.part.id, problem], check)
    assert part is not None
    return part


def _copying(part: StepPart, there: Run, step: int) -> Save:
    whole = part.manifest
    writes = [
        Write(
            name,
            record,
            Held(part.step.holders.get(name)) if record.is_array else None,
        )
        for name, record in whole.leaves.items()
    ]
    unsaved = dict(whole.unsaved)
    plan = WritePlan(writes, unsaved, whole.separators, whole.history)
    return Save(there.path(step), plan, whole.metadata, whole.layout, False)


def pieces_of_part(part: StepPart, writes: Sequence[Write]) -> Iterator[Piece]:
    """What this process uploads, in the pieces that it would have saved there."""
    for name, record, _, owned in writes:
        for region, _ in part.shards.get(name, ()):
            for piece in blocks(region, record.chunk_shape, record.itemsize):
                if owned is not None and start_of(piece) not in owned:
                    continue
                (array,) = read_regions(part, [RegionRead(name, record, piece)])
                if array.size:
                    yield Piece(name, record, piece, array)
