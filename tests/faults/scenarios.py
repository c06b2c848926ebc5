"""The situations in which a save is struck by a fault."""

import itertools
import pathlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import eqx_ckpt

from . import runs, workloads
from .shim import Fault
from .zygote import OF_MANY, Outcome, Zygote


# The seeds of the checkpoint that a save must leave alone, of the one that it replaces,
# of the one that it writes, and of the one that is saved after it.
BYSTANDER, REPLACED, WRITTEN, LATER = 1, 2, 3, 4


@dataclass(frozen=True)
class Place:
    """A directory in some state."""

    name: str
    before: dict[str, int] = field(default_factory=dict)  # name of checkpoint: seed
    layout: eqx_ckpt.typing.Layout = "zarr"
    layout_before: eqx_ckpt.typing.Layout = "zarr"

    def __str__(self) -> str:
        return self.name

    def prepare(self, zygote: Zygote, directory: pathlib.Path) -> None:
        directory.mkdir()
        for name, seed in self.before.items():
            args = (str(directory / name), seed, False, self.layout_before)
            zygote.call(workloads.save, *args)

    def copies(
        self, zygote: Zygote, disk: pathlib.Path
    ) -> Iterator[tuple[int, pathlib.Path]]:
        """1, 2, ..., each with a directory in this state, which stays."""
        self.prepare(zygote, disk / "scenario")
        for n in range(1, 1000):
            yield n, shutil.copytree(disk / "scenario", disk / f"scenario {n}")
        raise AssertionError("Nothing here needs a thousand operations.")

    @property
    def call(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        """What a process does there: a function of a directory, and its arguments."""
        raise NotImplementedError

    def perform(
        self, zygote: Zygote, directory: pathlib.Path, fault: Fault | None = None
    ) -> Outcome:
        function, args = self.call
        return zygote.run(function, str(directory), *args, fault=fault)

    def strikes(
        self, zygote: Zygote, disk: pathlib.Path, fault: Fault
    ) -> list[runs.Struck]:
        """What it does in copies, in each of which another operation is hit."""
        self.prepare(zygote, disk / "scenario")
        function, args = self.call
        call = (function, str(disk / "scenario"), fault, *args)
        return zygote.call(runs.strike_each, *call, timeout=OF_MANY)


@dataclass(frozen=True)
class Scenario(Place):
    """A save to `new`."""

    killed_before: bool = False  # an earlier save to the path was killed

    @property
    def overwrite(self) -> bool:
        return "new" in self.before

    @property
    def outcomes(self) -> list[dict[str, int]]:
        """What may be there after a fault: the state before, or with the new one."""
        return [self.before, self.after]

    @property
    def after(self) -> dict[str, int]:
        return {**self.before, "new": WRITTEN}

    def prepare(self, zygote: Zygote, directory: pathlib.Path) -> None:
        super().prepare(zygote, directory)
        if self.killed_before:
            self._leave_an_attempt(zygote, directory)

    def _leave_an_attempt(self, zygote: Zygote, directory: pathlib.Path) -> None:
        """Kill a save before its last rename: all of it is there but its name."""
        trial = directory.with_name("trial")
        shutil.copytree(directory, trial)
        count = self.perform(zygote, trial, Fault(str(trial), kinds=("rename",))).count
        shutil.rmtree(trial)
        fault = Fault(str(directory), count, kinds=("rename",))
        assert self.perform(zygote, directory, fault).signal
        assert len(list(directory.iterdir())) > len(self.before)

    @property
    def call(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return workloads.save_new, (WRITTEN, self.overwrite, self.layout)


AnyPlace = TypeVar("AnyPlace", bound=Place)


def of_databases(scenario: AnyPlace) -> AnyPlace:
    """The same, with databases."""
    name = f"{scenario.name}, databases"
    return replace(scenario, name=name, layout="ocdbt", layout_before="ocdbt")


FIRST = Scenario("first")
BESIDE = Scenario("beside", {"old": BYSTANDER})
OVERWRITE = Scenario("overwrite", {"old": BYSTANDER, "new": REPLACED})
AFTER_KILL = Scenario("after a killed save", {"old": BYSTANDER}, killed_before=True)
OVERWRITE_AFTER_KILL = Scenario(
    "overwrite after a killed save", OVERWRITE.before, killed_before=True
)
FIRST_DATABASE = of_databases(FIRST)
OVERWRITE_DATABASE = of_databases(OVERWRITE)
ARRAYS_OVER_DATABASE = replace(
    OVERWRITE, name="arrays over a database", layout_before="ocdbt"
)
DATABASE_OVER_ARRAYS = replace(OVERWRITE, name="a database over arrays", layout="ocdbt")
DATABASE_AFTER_KILL = of_databases(AFTER_KILL)
OF_DATABASES = [
    OVERWRITE_DATABASE,
    ARRAYS_OVER_DATABASE,
    DATABASE_OVER_ARRAYS,
    DATABASE_AFTER_KILL,
]


def steps(*numbers: int) -> dict[str, int]:
    """The names of steps, with their seeds, which are the same numbers."""
    return {f"{number:06d}": number for number in numbers}


@dataclass(frozen=True)
class RunScenario(Place):
    """A run, of which a manager saves one step more and removes the oldest ones."""

    step: int = 1
    keep: int = 2
    incremental: bool = False

    def prepare(self, zygote: Zygote, directory: pathlib.Path) -> None:
        super().prepare(zygote, directory)
        for name, seed in self.before.items():
            if seed == workloads.DAMAGED:
                workloads.lose_chunks(str(directory / name))

    @property
    def saved(self) -> dict[str, int]:
        return {**self.before, **steps(self.step)}

    @property
    def after(self) -> dict[str, int]:
        return kept(self.saved, self.keep)

    @property
    def outcomes(self) -> list[dict[str, int]]:
        """What may be there after a fault: nothing else is new, or gone."""
        removed = sorted({*self.saved} - {*self.after})
        gone = [c for n in range(9) for c in itertools.combinations(removed, n)]
        return [
            self.before,
            *({k: v for k, v in self.saved.items() if k not in g} for g in gone),
        ]

    @property
    def call(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return runs.save, (self.step, self.keep, None, self.layout, self.incremental)


@dataclass(frozen=True)
class Deletion(RunScenario):
    """A run, of which a manager deletes a step."""

    keep: int = 3

    @property
    def after(self) -> dict[str, int]:
        return {k: v for k, v in self.before.items() if k not in steps(self.step)}

    @property
    def outcomes(self) -> list[dict[str, int]]:
        return [self.before, self.after]

    @property
    def call(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return runs.delete, (self.step,)


def kills(
    scenario: Scenario | RunScenario, zygote: Zygote, disk: pathlib.Path
) -> Iterator[tuple[int, str, Outcome]]:
    """A process that is killed before its first operation, its second, ..., and none.

    Each time in another directory, which stays.
    """
    for n, directory in scenario.copies(zygote, disk):
        outcome = scenario.perform(zygote, directory, Fault(str(directory), n))
        assert outcome.error is None
        yield n, str(directory), outcome
        if not outcome.signal:
            return


def kept(found: dict[str, int], keep: int) -> dict[str, int]:
    """The newest ones."""
    return dict(sorted(found.items())[-keep:])


def check_resumed(resumed: runs.Resumed, keep: int, where: str) -> None:
    """A run goes on at the newest step that is intact, and nothing is left behind."""
    whole = {k: v for k, v in resumed.found.items() if v != workloads.DAMAGED}
    assert resumed.restored == max(whole.values(), default=0), where
    later = {**whole, **steps(resumed.restored + 1)}
    assert resumed.later == kept(later, keep), where
    assert not resumed.debris, where
    assert not resumed.later_debris, where


FIRST_STEP = RunScenario("first step")
KEEP_ONE = RunScenario("keep one", steps(1), step=2, keep=1)
KEEP_TWO = RunScenario("keep two", steps(1, 2, 3), step=4)
REPAIR = RunScenario(
    "a damaged step", {**steps(1, 2), "000003": workloads.DAMAGED}, step=3, keep=1
)
# Its chunks and its metadata are partly links to those of the step that goes.
INCREMENTAL = RunScenario(
    "incremental", steps(1, 101), step=201, keep=1, incremental=True
)
DELETE = Deletion("delete", steps(1, 2, 3), step=2)
DELETE_DAMAGED = Deletion("delete a damaged one", REPAIR.before, step=3)
KEEP_ONE_DATABASES = of_databases(KEEP_ONE)
REPAIR_DATABASE = of_databases(REPAIR)


@dataclass(frozen=True)
class Death:
    """A process that was killed before the `nth` operation of one kind."""

    scenario: RunScenario
    kind: str
    nth: int

    def __str__(self) -> str:
        return f"{self.scenario}, {self.kind} {self.nth}"

    def leave(self, zygote: Zygote, directory: pathlib.Path) -> None:
        """Move what it has left, but for its steps, to a directory."""
        place = directory.with_name("death")
        self.scenario.prepare(zygote, place)
        fault = Fault(str(place), self.nth, kinds=(self.kind,))
        assert self.scenario.perform(zygote, place, fault).signal
        for name in runs.hidden(str(place)):
            shutil.move(place / name, directory / name)
        shutil.rmtree(place)


# When the names, or the data, of what is there are not yet safe from a power cut.
UNSAFE_DEATHS = [
    Death(KEEP_TWO, "sync", 1),
    Death(KEEP_TWO, "sync", 2),
    Death(KEEP_TWO, "sync", 3),
    Death(KEEP_TWO, "unlink", 5),
    Death(REPAIR, "sync", 2),
    Death(KEEP_ONE_DATABASES, "unlink", 3),
    Death(REPAIR_DATABASE, "sync", 2),
]


@dataclass(frozen=True)
class Debris(Place):
    """A run with what processes have left that were killed."""

    deaths: tuple[Death, ...] = (
        Death(KEEP_TWO, "sync", 1),  # all of the step is there but its name
        Death(KEEP_TWO, "unlink", 5),  # half of what retention removes is gone
        Death(REPAIR, "unlink", 3),  # half of what was replaced is gone
    )

    def prepare(self, zygote: Zygote, directory: pathlib.Path) -> None:
        super().prepare(zygote, directory)
        for death in self.deaths:
            death.leave(zygote, directory)

    @property
    def call(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return runs.start, ()


DEBRIS = Debris("debris", steps(1, 2))
