"""Whether all processes of a job see the same place."""

import contextlib

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
    """Raise on all processes if two of them have the same place."""
    with contextlib.ExitStack() as stack:
        mark, problem = "", ""
        try:
            mark = stack.enter_context((place / "000000/").marked())
        except (OSError, CheckpointError) as e:
            problem = str(e)
        said = group.gather("places", [place.url(), mark, problem])
        same = [
            i
            for i, (url, other, _) in zip(group.members, said, strict=True)
            if i != group.members[group.index]
            and (url == place.url() and place.is_shared and place.sees(other))
        ]
        found = group.gather("same", same)
    for i, (_, _, why) in zip(group.members, said, strict=True):
        if why:
            raise CheckpointError(f"Process {i} cannot save to its directory: {why}")
    for i, others in zip(group.members, found, strict=True):
        if others:
            raise CheckpointError(
                f"Processes {i} and {others[0]} have the same directory "
                f"{said[group.members.index(i)][0]!r}, and with `shared=False` each "
                "needs its own. Put the number of the process into the path: "
                "`f'/scratch/run/{jax.process_index()}'`. If all of them see one "
                "directory, leave `shared` out."
            )
