"""The step whose chunks the next one of a run may share."""

import logging

from .._errors import CheckpointError
from .._sources.checkpoint_source import Checkpoint
from .._storage.interface.base import Base
from .run_steps import Run


logger = logging.getLogger("eqx_ckpt")


class StepBefore:
    """The newest committed step, as the base of the next one."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._saved: tuple[int, Base] | None = None

    def find(self, step: int | None) -> Base | None:
        """The base that a step is; `None` if there is none."""
        if step is None:
            return None
        # What this process has written itself, it need not read and compare.
        if self._saved is not None and self._saved[0] == step:
            return self._saved[1]
        try:
            return Checkpoint(self._run.location(step)).as_base()
        except (CheckpointError, OSError) as e:
            logger.warning("Nothing is shared with step %d: %s", step, e)
            return None

    def remember(self, step: int, base: Base) -> None:
        """Note a step that was committed."""
        self._saved = step, base
