"""Begin a new run with a step of another one."""

import contextlib
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence

from .._errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from .._format.run_history import forked, History, Session
from .._mirroring.step_upload import watched
from .._saving.save import Alone, Save
from .._saving.source_copy import pieces_of, plan_copy
from .._sources.checkpoint_source import Checkpoint
from .._sources.consistent_read import Reading
from .._steps.metrics_log import carry_metrics
from .._steps.run_config import Configs, ConfigWriter
from .._steps.run_steps import Run
from .._storage.interface.chunk_bytes import Piece
from .._storage.interface.committed_manifest import read_history
from .._storage.interface.sure_reads import missing_surely
from .._storage.locate import locate
from .._types import PathLike, SHARING_LAYOUTS


def check_is_new(run: Run, others: Sequence[Run]) -> None:
    """Raise unless a run can begin at a place, which is none of the others."""
    if run.directory in [other.directory for other in others]:
        raise CheckpointExistsError(
            f"{run.directory!r} is a place of this run itself. Nothing was written. "
            "Fork to another place."
        )
    steps = run.readable_or_not() or [entry.step for entry in run.unusable()]
    if steps:
        raise CheckpointExistsError(
            f"There is a run at {run.directory!r} already: it has step {steps[-1]}. "
            "Nothing was written. Fork to another place."
        )
    if found := run.explain():
        raise CheckpointExistsError(
            f"No run can begin at {run.directory!r}. {found} Nothing was written. Fork "
            "to another place."
        )


def fork(
    path: PathLike,
    step: int,
    new: Run,
    runs: Sequence[Run],
    goes_on: Callable[[], None],
) -> None:
    """Begin a run with the step at a path, which is of a run that has several places.

    On one disk, its files become links, and no data are read. `goes_on` is called when
    data were read.
    """
    with Reading(path) as reading:
        source = reading.open()
        assert isinstance(source, Checkpoint)
        if source.manifest.part is not None:
            raise CheckpointError(
                f"{source} is {source.manifest.part}, with which no run can begin. "
                "Nothing was written. Fork a step of the mirror, by a manager of that."
            )
        save = _forking(source, step, new)
        save.before_commit = lambda own: _carry(runs, source.manifest.history, new, own)
        if _can_be_linked(source, path, new.path(step)):
            if problem := missing_surely(source.chunks, source.manifest.leaves):
                raise CorruptCheckpointError(f"{source} is damaged: {problem}. {_WAY}")
            base = source.as_base()
            base.is_copied = True
            save.share(base)
        save.begin(Alone(), overwrite=False)
        with reading.unless_replaced(), _without_damage():
            save.run(watched(_left(save, source), lambda nbytes: goes_on()))
    _check_alone(new, step)


_WAY = (
    "Nothing was written. Pass an older `step`, or fork the copy in a mirror, by a "
    "manager of that."
)


@contextlib.contextmanager
def _without_damage() -> Generator[None]:
    """Say what to do about damage that is seen when the step is copied."""
    try:
        yield
    except CorruptCheckpointError as e:
        raise CorruptCheckpointError(f"{e} {_WAY}") from e


def _check_alone(new: Run, step: int) -> None:
    """Take the step back if another run has begun there meanwhile.

    Of two forks at once, the later one sees the earlier one. Both may see each other,
    and then neither is there.
    """
    own = read_history(new.location(step))
    for other in new.readable_or_not():
        try:
            history = read_history(new.location(other))
        except CheckpointNotFoundError:  # Taken back by the other fork meanwhile.
            continue
        if own is None or history is None or history.run != own.run:
            new.stored.remove([step])
            raise CheckpointExistsError(
                f"Another run has begun at {new.directory!r} meanwhile, with step "
                f"{other}. This fork was taken back. Fork to another place."
            )


def _forking(source: Checkpoint, step: int, new: Run) -> Save:
    manifest = source.manifest
    before = manifest.history
    number = step if before is None else before.step
    session = Session(secrets.token_hex(8), number, source.digest)
    history = forked(before, secrets.token_hex(16), step, session)
    plan = plan_copy(manifest)._replace(history=history)
    return Save(new.path(step), plan, manifest.metadata, manifest.layout, False)


def _carry(
    runs: Sequence[Run], history: History | None, new: Run, own: History | None
) -> None:
    """Copy the config of a step, and the metrics that have led to it, to a new run."""
    if history is not None and own is not None:
        ConfigWriter(Configs([run.place for run in runs]), new.place).put(history)
        carry_metrics(runs, history, new, own.run)


def _can_be_linked(source: Checkpoint, path: PathLike, target: PathLike) -> bool:
    if source.manifest.layout not in SHARING_LAYOUTS:
        return False
    return not locate(target).why_apart(locate(path))


def _left(save: Save, source: Checkpoint) -> Iterator[Piece]:
    """Link what can be linked, and read the rest."""
    save.adopt(save.arrays)
    yield from pieces_of(source, save.arrays)
