"""Upload by hand what a mirror has not."""

from collections.abc import Iterator
from typing import NamedTuple

from .._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from .._steps.run_config import Configs, ConfigWriter
from .._steps.run_steps import check_places, Run
from .._storage.interface.committed_manifest import read_history
from .._types import PathLike
from .one_history import Beside, Between
from .step_upload import is_there, LocalProblem, Target, upload


class Synced(NamedTuple):
    """A step that was uploaded, or why it cannot be."""

    step: int
    problem: CheckpointError | None


def sync(directory: PathLike, mirror: PathLike) -> list[int]:
    """Upload all steps of a run that a second place has not, the newest one first.

    Each is uploaded as a [`eqx_ckpt.CheckpointManager`][] with an [`eqx_ckpt.Mirror`][]
    does it: compared with its checksums on the way, and there whole or not at all.
    Nothing there is deleted, and nothing is replaced but the same step, where it is
    damaged. Call it in one process.

    **Arguments:**

    - `directory`: the directory of the run, or its location in an object store.
    - `mirror`: the other place. It need not exist.

    **Returns:**

    The steps that were uploaded, in order.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no step in `directory`.
    - [`eqx_ckpt.CheckpointError`][]: the newest steps of the two places did not come
        from one another; nothing was uploaded. Or older steps cannot be uploaded, as
        they are of another history, or the mirror has others of their numbers; all
        the rest is there then.
    - [`eqx_ckpt.CorruptCheckpointError`][]: as before, and one of them is damaged, or
        a config of the run.
    - `OSError`: the mirror fails. A second call goes on.

    !!! example

        ```python
        import eqx_ckpt

        with eqx_ckpt.CheckpointManager("runs/a") as manager:
            manager.save(100, {"step": 100})
        assert eqx_ckpt.sync("runs/a", "backup/a") == [100]
        assert eqx_ckpt.sync("runs/a", "backup/a") == []
        ```
    """
    done: list[int] = []
    problems: list[CheckpointError] = []
    for step, problem in synced(directory, mirror):
        if problem is None:
            done.append(step)
        else:
            problems.append(problem)
    if problems:
        is_damage = any(isinstance(one, CorruptCheckpointError) for one in problems)
        kind = CorruptCheckpointError if is_damage else CheckpointError
        raise kind("\n".join(map(str, problems)))
    return sorted(done)


def synced(directory: PathLike, mirror: PathLike) -> Iterator[Synced]:
    """As `sync`, step by step."""
    run, there = Run(directory), Run(mirror)
    check_places([run, there], mirror)
    # What is misnamed is said when the others are there.
    local = run.readable_or_not() or run.at_least_one()
    Between().check([run, there], [local, there.readable_or_not()])
    beside = Beside(there)
    without: list[Synced] = []

    def note(step: int, problem: Exception) -> None:
        kind = (
            type(problem) if isinstance(problem, CheckpointError) else CheckpointError
        )
        why = f"Step {step} is in the mirror without its config: {problem}"
        without.append(Synced(step, kind(why)))

    configs = ConfigWriter(Configs([run.place]), there.place, note)
    for step in reversed(local):
        try:
            if not is_there(run, step, there):
                upload(run, step, Target(there, beside, configs), lambda nbytes: None)
                yield Synced(step, None)
            else:
                configs.put(read_history(run.location(step)))
        except LocalProblem as e:
            if not isinstance(e.__cause__, CheckpointNotFoundError):
                yield Synced(step, _of_the_kind(e))
        except CheckpointError as e:
            yield Synced(step, e)
    yield from without
    for entry in run.unusable():
        yield Synced(entry.step, CorruptCheckpointError(entry.problem))


def _of_the_kind(problem: LocalProblem) -> CheckpointError:
    """The same text, as damage if it is that."""
    is_damage = isinstance(problem.__cause__, CorruptCheckpointError)
    return CorruptCheckpointError(str(problem)) if is_damage else problem
