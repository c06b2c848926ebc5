"""The directory of a training run: which steps are in it."""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ._checkpoint import identity, is_checkpoint, read_metadata
from ._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ._retention import Keep
from ._store import KvSpec, locate
from ._types import PathLike


logger = logging.getLogger("eqx_ckpt")
_STEP = re.compile(r"[0-9]{6}|[1-9][0-9]{6,}")


class Run:
    """What the disk says; nothing is remembered that could become wrong."""

    def __init__(self, directory: PathLike) -> None:
        base = locate(directory)
        if base["driver"] != "file":
            raise CheckpointError(
                f"{os.fspath(directory)!r} is no directory of a file system. Pass one."
            )
        self.directory = base["path"].rstrip("/") or "/"
        self._metadata: dict[int, tuple[object, Any]] = {}

    def path(self, step: int) -> str:
        if type(step) is not int or step < 0:
            raise CheckpointError(
                f"{step!r} is no step. Pass a non-negative `int`, or `int(step)`."
            )
        return f"{self.directory}/{step:06d}"

    def named(self) -> list[int]:
        """What has the name of a step, in order."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def steps(self) -> list[int]:
        """The steps that are saved, in order, damaged or not."""
        named = self.named()
        steps = [step for step in named if is_checkpoint(self._base(step))]
        # Another process may have removed one since, after it had saved a newer one.
        vanished = len(steps) < len(named) and not {*named} <= {*self.named()}
        return self.steps() if vanished else steps

    def metadata(self, step: int) -> Any:
        """The metadata of a step; read again only if another step is in its place."""
        base = self._base(step)
        now = identity(base)
        if step not in self._metadata or self._metadata[step][0] != now:
            self._metadata[step] = now, read_metadata(base)
        return self._metadata[step][1]

    def _base(self, step: int) -> KvSpec:
        return {"driver": "file", "path": self.path(step) + "/"}


class Candidates(Mapping[int, Any]):
    """The metadata of the steps that may be removed, read when they are asked for.

    **Attributes:**

    - `unreadable`: the steps whose metadata were asked for, and cannot be read.
    """

    def __init__(self, run: Run, without: set[int]) -> None:
        self._run = run
        steps = (step for step in run.steps() if step not in without)
        self._steps = dict.fromkeys(steps)
        self.unreadable: set[int] = set()

    def __getitem__(self, step: int) -> Any:
        if step not in self._steps:
            raise KeyError(step)
        try:
            return self._run.metadata(step)
        except (CorruptCheckpointError, CheckpointNotFoundError) as e:
            # It cannot be told to be worse, so it stays.
            logger.warning("The metadata of step %d cannot be read: %s", step, e)
            self.unreadable.add(step)
            return None

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def superfluous(
    run: Run, keep: Sequence[Keep], damaged: set[int], saved: int
) -> list[str]:
    """The paths of the steps that nothing keeps, now that `saved` is."""
    steps = Candidates(run, damaged)
    kept = {saved, max(steps, default=saved)}
    for function in keep:
        chosen: Any = function(steps)
        if not isinstance(chosen, Iterable):
            raise CheckpointError(
                f"`keep` returned {chosen!r}. It has to return steps."
            )
        kept.update(chosen)
    return [run.path(step) for step in steps if step not in kept | steps.unreadable]


def advice(steps: Sequence[int], whole: int | None) -> str:
    """What to do about the newest of the steps, which is damaged."""
    if whole is None:
        return "None of the older steps is whole."
    return (
        f"This is step {steps[-1]}, the newest. Step {whole} is whole: pass "
        f"`on_damage='fallback'` to go on from there (what is damaged is then replaced "
        f"when that step is saved again), or `step={whole}` to look at it."
    )
