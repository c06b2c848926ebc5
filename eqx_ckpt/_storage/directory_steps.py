"""The steps of a run in a directory; nothing is cached that could be stale."""

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import committed
from .storage import is_step, step_name, Steps, Storage


class DirectorySteps(Steps):
    """As `Steps`; the two functions remove checkpoints and sweep dead attempts."""

    def __init__(
        self,
        run: Storage,
        remove: Callable[[Iterable[str]], None],
        sweep: Callable[[str], None],
    ) -> None:
        self._run = run
        self._remove = remove
        self._sweep = sweep
        # By step: the identity and the metadata of its checkpoint.
        self._metadata: dict[int, tuple[object, Any]] = {}

    def named(self) -> list[int]:
        try:
            names = os.listdir(self._run.spec["path"])
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if is_step(name))

    def saved(self) -> list[int]:
        named = self.named()
        steps = [step for step in named if committed.is_checkpoint(self._step(step))]
        # Another process may have removed one meanwhile, after saving a newer one.
        vanished = len(steps) < len(named) and not {*named} <= {*self.named()}
        return self.saved() if vanished else steps

    def metadata(self, step: int) -> Any:
        """Read again only if the step was replaced."""
        place = self._step(step)
        now = place.identity()
        if step not in self._metadata or self._metadata[step][0] != now:
            self._metadata[step] = now, committed.read_metadata(place)[1]
        return self._metadata[step][1]

    def remove(self, steps: Sequence[int]) -> None:
        self._remove(self._step(step).url() for step in steps)

    def sweep(self, *, starting: bool) -> None:
        """On a disk, sweeping once is enough."""
        if starting:
            with contextlib.suppress(FileNotFoundError):
                self._sweep(self._run.spec["path"])

    def _step(self, step: int) -> Storage:
        return self._run / step_name(step)
