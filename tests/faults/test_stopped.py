"""A process stops at any file operation, for as long as others like, and goes on."""

import itertools
import pathlib
import random
import shutil

import pytest

from faults import races, scenarios, stopped
from faults.shim import Fault
from faults.zygote import Zygote


pytestmark = pytest.mark.once


KINDS = ("create", "open", "mkdir", "sync", "rename", "link", "unlink", "lock")


@pytest.mark.parametrize(
    "distance", [17, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["few", "all"]
)
def test_another_works_meanwhile(
    zygote: Zygote, disk: pathlib.Path, distance: int
) -> None:
    """Nothing acknowledged is lost, and all is as if one had come after the other."""
    draw = random.Random(distance)
    scenarios.DEBRIS.prepare(zygote, disk / "run")
    names = [*stopped.OPERATIONS]
    for first in names:
        for n in itertools.count(1 + draw.randrange(distance), distance):
            seconds = names if distance == 1 else [draw.choice(names)]
            if not all([_is_stopped(zygote, disk, first, s, n) for s in seconds]):
                break


def test_what_is_to_be_replaced_is_removed(zygote: Zygote, disk: pathlib.Path) -> None:
    """While it is looked at."""
    scenarios.DEBRIS.prepare(zygote, disk / "run")
    for n in (1, 2, 3):
        assert _is_stopped(zygote, disk, "overwrite", "retain", n)


@pytest.mark.parametrize("second", ["retain", "delete", "overwrite"])
def test_what_is_to_be_replaced_changes(
    zygote: Zygote, disk: pathlib.Path, second: str
) -> None:
    """Right before it would be: it is removed, or it is there only now."""
    scenarios.DEBRIS.prepare(zygote, disk / "run")
    gone = "000002" if second == "overwrite" else ""
    if gone:
        shutil.rmtree(disk / "run" / gone)
    assert _is_stopped(zygote, disk, "overwrite", second, 1, ("rename",), gone)


def _is_stopped(
    zygote: Zygote,
    disk: pathlib.Path,
    first: str,
    second: str,
    n: int,
    kinds: tuple[str, ...] = KINDS,
    gone: str = "",
) -> bool:
    """Stop at the nth operation; whether there is one."""
    directory = str(shutil.copytree(disk / "run", disk / "copy"))
    one, two = (stopped.OPERATIONS[name].perform for name in (first, second))
    fault = Fault(directory, n, "STOP", kinds)
    calls = (one, (directory, 0)), (two, (directory, stopped.OTHER))
    look = stopped.look, (directory,)
    answers = zygote.call(races.overtake_and_look, fault, *calls, look)
    shutil.rmtree(directory)
    if answers is None:
        return False
    before = {k: v for k, v in scenarios.DEBRIS.before.items() if k != gone}
    problem = stopped.problem(before, first, second, answers)
    assert not problem, f"{first} stops at {n}: {problem}"
    return True
