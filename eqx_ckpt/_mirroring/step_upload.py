"""Copy one step to a mirror, unless it is there."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

from .._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from .._format.manifest import Manifest
from .._format.manifest_parser import from_bytes
from .._format.run_history import History
from .._format.source import Source
from .._saving.save import Alone, Save
from .._saving.source_copy import equal_to, pieces_of, plan_copy
from .._sources.consistent_read import Reading
from .._steps.compare_histories import is_same_step, why_not_the_same
from .._steps.run_config import ConfigWriter
from .._steps.run_steps import Run
from .._steps.step_before import StepBefore
from .._storage.calls.threads import Pool
from .._storage.calls.worker_threads import MAX_IN_FLIGHT
from .._storage.interface.base import Base
from .._storage.interface.chunk_bytes import Piece
from .._storage.interface.committed_manifest import read_committed
from .._types import PathLike, SHARING_LAYOUTS
from .one_history import Beside, OtherHistory


class LocalProblem(CheckpointError):
    """The step to be uploaded cannot be read, or is gone."""


class Target(NamedTuple):
    """A mirror, and what is known of the steps there.

    **Attributes:**

    - `beside`: compares what is uploaded with the steps there.
    - `configs`: puts the configs of steps there.
    - `before`: the last one, with which chunks are shared that are equal; or `None`.
    """

    run: Run
    beside: Beside
    configs: ConfigWriter
    before: StepBefore | None = None

    def remember(self, step: int, save: Save) -> None:
        """Note a step that was uploaded."""
        if self.before is not None and save.bases is not None:
            self.before.remember(step, save.bases[1])


def upload(run: Run, step: int, there: Target, watch: Callable[[int], None]) -> None:
    """Copy a step to a mirror. If this returns, it is there, intact.

    `watch` is called with the bytes of each piece; what it raises gives the upload up.
    """
    with Reading(run.path(step)) as reading:
        with _local(reading):
            source = reading.open()
        manifest = source.manifest
        _check_is_whole(run, step, manifest)
        base = _find_base(step, manifest, there)
        with Pool(1) as pool:
            looking = pool.submit(there.beside.check, step, manifest.history)
            sending = _Sending(reading, source, there, step, base, looking)
            _send_unless_there(run, sending, watch)
    check_still_beside(there.run, step, manifest.history, there.beside)


class _Sending(NamedTuple):
    """A step that is uploaded while the steps there are looked at.

    - `base`: the step there whose chunks are shared, if any.
    - `looking`: fails if the step does not belong to those there. Nothing is committed
        before it has ended, and nothing more is sent once it has failed.
    """

    reading: Reading
    source: Source
    there: Target
    step: int
    base: Base | None
    looking: Future[None]

    def send(self, watch: Callable[[int], None], *, overwrite: bool) -> None:
        manifest, (mirror, _, configs, before) = self.source.manifest, self.there
        save = _copying(manifest, mirror.path(self.step))

        def before_commit(history: History | None) -> None:
            self.looking.result()
            configs.put(history)

        save.before_commit = before_commit
        if sharing(before, manifest):
            save.share(self.base)
        save.begin(Alone(), overwrite=overwrite)
        save.send_at_most(MAX_IN_FLIGHT)
        if save.bases is not None:
            save.adopt(equal_to(manifest, save.arrays, save.bases[0]))
        save.run(watched(self._pieces(save), watch))
        self.there.remember(self.step, save)

    def _pieces(self, save: Save) -> Iterator[Piece]:
        for piece in _read(pieces_of(self.source, save.arrays), self.reading):
            if self.looking.done():
                self.looking.result()
            yield piece


def _send_unless_there(
    run: Run, sending: _Sending, watch: Callable[[int], None]
) -> None:
    """Send a step; if the mirror has it already, replace it only if it is damaged."""
    for overwrite in (False, True):
        try:
            sending.send(watch, overwrite=overwrite)
        except CheckpointExistsError:
            # Another manager of the run may have uploaded it meanwhile, too.
            sending.looking.exception()
            manifest, mirror = sending.source.manifest, sending.there.run
            is_intact = state_there(run, sending.step, manifest, mirror)
            if is_intact is None or overwrite and not is_intact:
                raise
            if is_intact:
                return
        else:
            return


def _check_is_whole(run: Run, step: int, manifest: Manifest) -> None:
    if manifest.part is not None:
        raise LocalProblem(
            f"{run.location(step)} is {manifest.part}, which cannot be uploaded alone. "
            "The managers of its job do so together, with `shared=False`."
        )


def state_there(run: Run, step: int, manifest: Manifest, mirror: Run) -> bool | None:
    """Whether the copy of a step is intact; `None` if there is none.

    Raise if another step is there.
    """
    found = _found(run, step, manifest, mirror)
    return None if found is None else not mirror.stored.problem(step)


def check_still_beside(
    mirror: Run, step: int, history: History | None, beside: Beside
) -> None:
    """Take a step back if the mirror has steps of another history now."""
    try:
        # Another machine may have uploaded a step of another history meanwhile.
        beside.check(step, history)
    except OtherHistory:
        mirror.stored.remove([step])
        raise
    beside.note(step, history)


def _find_base(step: int, manifest: Manifest, there: Target) -> Base | None:
    """The last step there, if chunks are shared with it."""
    before = sharing(there.before, manifest)
    return before and before.find(there.run.newest({step}))


def sharing(before: StepBefore | None, manifest: Manifest) -> StepBefore | None:
    """What knows the step before, if chunks are shared with it."""
    return before if manifest.layout in SHARING_LAYOUTS else None


def _copying(manifest: Manifest, path: PathLike) -> Save:
    plan, metadata = plan_copy(manifest), manifest.metadata
    save = Save(path, plan, metadata, manifest.layout, False)
    save.way_out = lambda: "Delete what is no longer needed there."
    return save


def is_there(run: Run, step: int, mirror: Run) -> bool:
    """Whether a mirror has a step, as far as can be told without reading its data.

    Raise if it has another step of that number.
    """
    with Reading(run.path(step)) as reading, _local(reading):
        manifest = reading.open().manifest
    return bool(state_there(run, step, manifest, mirror))


def _found(run: Run, step: int, manifest: Manifest, mirror: Run) -> Manifest | None:
    """The manifest of a step in a mirror; raise if it is not that of the same step."""
    try:
        _, found = read_committed(mirror.location(step), from_bytes)
    except CheckpointNotFoundError:
        return None
    except CorruptCheckpointError as e:
        raise CheckpointExistsError(
            f"Step {step} in {mirror.directory!r} is damaged, and may be another step: "
            "nothing was uploaded. Delete it: "
            f"`eqx_ckpt.CheckpointManager({mirror.directory!r}).delete({step})`."
        ) from e
    if found.part is not None or not is_same_step(manifest, found):
        raise CheckpointExistsError(
            f"{why_not_the_same(step, mirror.directory, run.directory)} Nothing was "
            "uploaded. Pass another place as `mirror`, or delete the steps there that "
            "you do not want."
        )
    return found


@contextlib.contextmanager
def _local(reading: Reading) -> Generator[None]:
    """Tell what fails here from what fails in the mirror."""
    try:
        yield
    except (CheckpointError, OSError) as e:
        raise LocalProblem(f"{reading} cannot be uploaded: {e}") from e


def _read(pieces: Iterator[Piece], reading: Reading) -> Iterator[Piece]:
    while True:
        with _local(reading), reading.unless_replaced():
            piece = next(pieces, None)
        if piece is None:
            return
        yield piece


def watched(pieces: Iterable[Piece], watch: Callable[[int], None]) -> Iterator[Piece]:
    for piece in pieces:
        watch(piece.array.nbytes)
        yield piece
