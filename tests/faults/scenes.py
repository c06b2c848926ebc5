"""The situations in which a save is struck by a fault."""

import pathlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import workloads
from .shim import Fault
from .zygote import Outcome, Zygote


# The seeds of the checkpoint that a save must leave alone, of the one that it replaces,
# of the one that it writes, and of the one that is saved after it.
BYSTANDER, REPLACED, WRITTEN, LATER = 1, 2, 3, 4


@dataclass(frozen=True)
class Scene:
    """A directory in some state, and a save to `new` in it."""

    name: str
    before: dict[str, int] = field(default_factory=dict)  # name of checkpoint: seed
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
        directory.mkdir()
        for name, seed in self.before.items():
            zygote.call(workloads.save, str(directory / name), seed)
        if self.killed_before:
            self._leave_an_attempt(zygote, directory)

    def _leave_an_attempt(self, zygote: Zygote, directory: pathlib.Path) -> None:
        """Kill a save before its last rename: all of it is there but its name."""
        trial = directory.with_name("trial")
        shutil.copytree(directory, trial)
        count = self.save(zygote, trial, Fault(str(trial), kinds=("rename",))).count
        shutil.rmtree(trial)
        fault = Fault(str(directory), count, kinds=("rename",))
        assert self.save(zygote, directory, fault).signal
        assert len(list(directory.iterdir())) > len(self.before)

    def save(
        self, zygote: Zygote, directory: pathlib.Path, fault: Fault | None = None
    ) -> Outcome:
        path = str(directory / "new")
        return zygote.run(workloads.save, path, WRITTEN, self.overwrite, fault=fault)

    def save_and_look(
        self, zygote: Zygote, directory: pathlib.Path, fault: Fault
    ) -> Outcome:
        args = (str(directory), "new", WRITTEN, self.overwrite)
        return zygote.run(workloads.save_and_look, *args, fault=fault)

    def copies(
        self, zygote: Zygote, disk: pathlib.Path
    ) -> Iterator[tuple[int, pathlib.Path]]:
        """1, 2, ..., each with a directory in the scene's state."""
        self.prepare(zygote, disk / "scene")
        for n in range(1, 1000):
            shutil.copytree(disk / "scene", disk / "copy")
            yield n, disk / "copy"
            shutil.rmtree(disk / "copy")
        raise AssertionError("A save does not need a thousand operations.")


FIRST = Scene("first")
BESIDE = Scene("beside", {"old": BYSTANDER})
OVERWRITE = Scene("overwrite", {"old": BYSTANDER, "new": REPLACED})
AFTER_KILL = Scene("after a killed save", {"old": BYSTANDER}, killed_before=True)
OVERWRITE_AFTER_KILL = Scene(
    "overwrite after a killed save", OVERWRITE.before, killed_before=True
)
