"""Copy one step to a mirror, unless it is there."""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import NamedTuple

from .._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
)
from .._format.manifest import Manifest
from .._format.manifest_parser import from_bytes
from .._format.run_history import History
from .._saving.save import Alone, Save
from .._saving.source_copy import equal_to, pieces_of, plan_copy
from .._sources.consistent_read import Reading
from .._steps.compare_histories import is_same_step, why_not_the_same
from .._steps.run_config import ConfigWriter
from .._steps.run_steps import Run
from .._steps.step_before import StepBefore
from .._storage.calls.worker_threads import MAX_IN_FLIGHT
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
    mirror, beside, configs, _ = there
    with Reading(run.path(step)) as reading:
        with _local(reading):
            source = reading.open()
        history = source.manifest.history
        overwrite = replaces(run, step, source.manifest, mirror, beside)
        if overwrite is not None:
            save = _copying(source.manifest, mirror.path(step))
            save.before_commit = configs.put
            try:
                _begin(save, source.manifest, step, there, overwrite=overwrite)
                pieces = _read(pieces_of(source, save.arrays), reading)
                save.run(watched(pieces, watch))
            except CheckpointExistsError:
                # Another manager of the run may have uploaded it meanwhile.
                found = _found(run, step, source.manifest, mirror)
                if found is None or mirror.stored.problem(step):
                    raise
            else:
                there.remember(step, save)
    check_still_beside(mirror, step, history, beside)


def replaces(
    run: Run, step: int, manifest: Manifest, mirror: Run, beside: Beside
) -> bool | None:
    """Whether the copy of a step replaces one that is damaged; `None` if it is there.

    Raise if another step is there, or steps of another history.
    """
    if manifest.part is not None:
        raise LocalProblem(
            f"{run.location(step)} is {manifest.part}, which cannot be uploaded alone. "
            "The managers of its job do so together, with `shared=False`."
        )
    found = _found(run, step, manifest, mirror)
    if found is None and manifest.history is not None:
        beside.check(step, manifest.history)
    if found is None or mirror.stored.problem(step):
        return found is not None
    return None


def check_still_beside(
    mirror: Run, step: int, history: History | None, beside: Beside
) -> None:
    """Take a step back if the mirror has steps of another history now."""
    if history is None:
        return
    try:
        # Another machine may have uploaded a step of another history meanwhile.
        beside.check(step, history)
    except OtherHistory:
        mirror.stored.remove([step])
        raise
    beside.note(step, history)


def _begin(
    save: Save, manifest: Manifest, step: int, there: Target, *, overwrite: bool
) -> None:
    """Begin an upload, and share what the last step there has."""
    if there.before is not None and manifest.layout in SHARING_LAYOUTS:
        save.share(there.before.find(there.run.newest({step})))
    save.begin(Alone(), overwrite=overwrite)
    save.send_at_most(MAX_IN_FLIGHT)
    if save.bases is not None:
        save.adopt(equal_to(manifest, save.arrays, save.bases[0]))


def _copying(manifest: Manifest, path: PathLike) -> Save:
    plan, metadata = plan_copy(manifest), manifest.metadata
    save = Save(path, plan, None, metadata, manifest.layout, False)
    save.way_out = lambda: "Delete what is no longer needed there."
    return save


def is_there(run: Run, step: int, mirror: Run) -> bool:
    """Whether a mirror has a step, as far as can be told without reading its data.

    Raise if it has another step of that number.
    """
    with Reading(run.path(step)) as reading, _local(reading):
        manifest = reading.open().manifest
    found = _found(run, step, manifest, mirror)
    return found is not None and not mirror.stored.problem(step)


def _found(run: Run, step: int, manifest: Manifest, mirror: Run) -> Manifest | None:
    """The manifest of a step in a mirror; raise if it is not that of the same step."""
    try:
        _, found = read_committed(mirror.location(step), from_bytes)
    except CheckpointNotFoundError:
        return None
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
