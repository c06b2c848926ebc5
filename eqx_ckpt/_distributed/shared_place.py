"""Whether all processes of a job see the same place."""

import contextlib

from .._errors import CheckpointError
from .._storage.interface.place import run_of, Storage
from .call_matching import one_for_all
from .process_group import Group


def check_is_one(group: Group, target: Storage) -> None:
    """Raise on all processes if one of them does not see the place of the first one.

    It does not see the mark that the first one leaves there. Two disks that were made
    in the same way may have the same inodes.
    """
    with contextlib.ExitStack() as stack:
        mark = group.from_first("mark", lambda: stack.enter_context(target.marked()))
        seen = group.gather("seen", target.sees(mark))
    blind = [i for i, sees in zip(group.members, seen, strict=True) if not sees]
    if blind:
        who = " and ".join(f"process {i}" for i in blind)
        raise CheckpointError(
            f"The processes have different directories at {run_of(target).url()!r}: "
            f"what process {group.members[0]} has made there, {who} of {group.size} "
            f"{'does' if len(blind) == 1 else 'do'} not see. Nothing was saved. "
            f"{one_for_all('save to')}"
        )
