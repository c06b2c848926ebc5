"""Whether all processes of a job see the same place."""

import contextlib
import os

from .._errors import CheckpointError
from .._storage.interface.place import run_of, Storage
from .call_matching import one_for_all
from .process_errors import named
from .process_group import Group, Solo


def check_is_one(group: Group | Solo, target: Storage) -> None:
    """Raise on all processes if one of them does not see the place of the first one.

    It does not see the mark that the first one leaves there. Two disks that were made
    in the same way may have the same inodes.
    """
    with contextlib.ExitStack() as stack:
        mark = group.from_first("mark", lambda: stack.enter_context(target.marked()))
        blind = group.combine(
            "seen",
            target.sees(mark),
            lambda seen: [i for i, s in zip(group.members, seen, strict=True) if not s],
        )
    if blind:
        raise CheckpointError(
            f"The processes have different directories at {run_of(target).url()!r}: "
            f"what process {group.members[0]} has made there, {named(blind)} of "
            f"{group.size} {'does' if len(blind) == 1 else 'do'} not see. Nothing was "
            "saved. "
            f"{one_for_all('save to')}"
        )


def check_apart(group: Group | Solo, place: Storage) -> None:
    """Raise on all processes if two of them have the same place.

    Each leaves a mark, and then says which marks it sees. Only the first process hears
    them all.
    """
    mark, problem, step = "", "", place / "000000/"
    said: list[list[str]] = []
    with contextlib.ExitStack() as stack:
        try:
            mark = os.path.basename(stack.enter_context(step.marked()))
        except (OSError, CheckpointError) as e:
            problem = str(e)
        if not mark and place.is_shared:
            mark = place.url()

        def hear(values: list[list[str]]) -> None:
            said.extend(values)
            for i, (_, _, why) in zip(group.members, values, strict=True):
                if why:
                    raise CheckpointError(
                        f"Process {i} cannot save to its directory: {why}"
                    )

        def compare(seen: list[list[str]]) -> None:
            made: dict[str, int] = {}
            for i, (_, found, _) in enumerate(said):
                made.setdefault(found, i)
            for i, marks in enumerate(seen):
                other = next((made[m] for m in marks if made.get(m, i) != i), None)
                if other is not None:
                    pair = sorted(group.members[k] for k in (i, other))
                    raise _same(pair, said[i][0])

        group.combine("places", [place.url(), mark, problem], hear)
        group.combine("same", step.marks() or [mark] * bool(mark), compare)


def _same(pair: list[int], where: str) -> CheckpointError:
    return CheckpointError(
        f"Processes {pair[0]} and {pair[1]} have the same directory {where!r}, and "
        "with `shared=False` each needs its own. Put the number of the process into "
        "the path: `f'/scratch/run/{jax.process_index()}'`. If all of them see one "
        "directory, leave `shared` out."
    )
