"""The directory of a training run: which steps are in it."""

import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ._format.manifest import MANIFEST
from ._retention import Keep
from ._storage.bucket import ATTEMPT, Debris, remove_checkpoint
from ._storage.checkpoint import identity, is_checkpoint, read_metadata
from ._storage.directory import remove, sweep
from ._storage.key_values import check_bucket, list_keys
from ._storage.kvstore import KvSpec, locate, url
from ._storage.url import Store
from ._types import PathLike


logger = logging.getLogger("eqx_ckpt")
_STEP = re.compile(r"[0-9]{6}|[1-9][0-9]{6,}")


class Run:
    """What the disk says; nothing is remembered that could become wrong."""

    def __init__(self, directory: PathLike) -> None:
        self._base = locate(directory)
        self._place = directory
        self.directory = url(self._base) or "/"
        self._metadata: dict[int, tuple[object, Any]] = {}

    def path(self, step: int) -> PathLike:
        if type(step) is not int or step < 0:
            raise CheckpointError(
                f"{step!r} is no step. Pass a non-negative `int`, or `int(step)`."
            )
        if isinstance(self._place, Store):
            return self._place / f"{step:06d}"
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
        steps = [step for step in named if is_checkpoint(self.base(step))]
        # Another process may have removed one since, after it had saved a newer one.
        vanished = len(steps) < len(named) and not {*named} <= {*self.named()}
        return self.steps() if vanished else steps

    def metadata(self, step: int) -> Any:
        """The metadata of a step; read again only if another step is in its place."""
        base = self.base(step)
        now = identity(base)
        if step not in self._metadata or self._metadata[step][0] != now:
            self._metadata[step] = now, read_metadata(base)
        return self._metadata[step][1]

    def base(self, step: int) -> KvSpec:
        return {**self._base, "path": f"{self._base['path']}{step:06d}/"}

    def remove(self, steps: Sequence[int]) -> None:
        remove(os.fspath(self.path(step)) for step in steps)

    def sweep(self, *, starting: bool) -> None:
        """Remove what dead attempts have left; on a disk, once is enough."""
        if starting:
            with contextlib.suppress(FileNotFoundError):
                sweep(self.directory)


class StoreRun(Run):
    """As `Run`, in an object store: there, one list of all keys says what there is."""

    def __init__(self, directory: PathLike) -> None:
        super().__init__(directory)
        self._debris = Debris(self._base)

    def named(self) -> list[int]:
        return sorted(self._named())

    def _named(self) -> dict[int, bool]:
        """The steps that have a manifest, and whether it has data of its own."""
        found: dict[int, bool] = {}
        attempts: set[int] = set()
        everything = list_keys(self._base)
        if not everything:
            check_bucket(self._base)
        for key in everything:
            step, _, rest = key.partition("/")
            if not _STEP.fullmatch(step):
                continue
            if rest == MANIFEST:
                found[int(step)] = True
            elif ATTEMPT.match(rest):
                attempts.add(int(step))
        return {step: step in attempts for step in found}

    def steps(self) -> list[int]:
        named = self._named()
        # A manifest without data is one of an empty tree, or something else.
        return sorted(
            step
            for step, has_data in named.items()
            if has_data or is_checkpoint(self.base(step))
        )

    def remove(self, steps: Sequence[int]) -> None:
        for step in steps:
            try:
                remove_checkpoint(self.base(step))
            except CorruptCheckpointError as e:
                # The step is gone, and a sweep will find its data.
                logger.warning("Could not delete all of step %d: %s", step, e)

    def sweep(self, *, starting: bool) -> None:
        self._debris.sweep()


def run_at(directory: PathLike) -> Run:
    is_on_disk = locate(directory)["driver"] == "file"
    return Run(directory) if is_on_disk else StoreRun(directory)


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
) -> list[int]:
    """The steps that nothing keeps, now that `saved` is there."""
    steps = Candidates(run, damaged)
    kept = {saved, max(steps, default=saved)}
    for function in keep:
        chosen: Any = function(steps)
        if not isinstance(chosen, Iterable):
            raise CheckpointError(
                f"`keep` returned {chosen!r}. It has to return steps."
            )
        kept.update(chosen)
    return [step for step in steps if step not in kept | steps.unreadable]
