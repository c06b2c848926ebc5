"""Decide to save as often as a part of the time allows."""

import numbers
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from .._distributed.jax_service import is_first
from .._saving.background_save import Saving
from .._types import check_optional_integer, is_real, shown, wrong
from .save_times import When


# The mean is that of so many saves, the last ones.
_MEASURED = 8


def save_when_idle(budget: float = 0.01, *, max_steps: int | None = None) -> When:
    """Save whenever no save is running, as often as saves cost little.

    The manager measures how long its calls of `save` take. The next save is due when
    the mean of the last eight is at most `budget` of the time since the last one began.
    Calls that fail at once are left out, but for the first. The first save is due at
    once, as nothing was measured before. In a job of several processes, process 0
    decides for all.

    **Arguments:**

    - `budget`: the part of the time for which the training may wait for saves, a number
        between 0 and 1; what a save does in the background does not count.
    - `max_steps`: a save is due in any case so many steps after the last one, also if
        one is running; by default, there is no bound.

    **Returns:**

    A function for the `when` of [`eqx_ckpt.CheckpointManager`][], not for that of an
    [`eqx_ckpt.Mirror`][]. It measures one manager: create one for each.

    **Raises:**

    - `ValueError`: `budget` is not between 0 and 1, or `max_steps` is not a positive
        integer.

    !!! example

        ```python
        import eqx_ckpt

        when = eqx_ckpt.save_when_idle(max_steps=1000)
        with eqx_ckpt.CheckpointManager("runs/a", when=when) as manager:
            assert manager.should_save(1)
        ```
    """
    if not is_real(budget) or not 0 < budget < 1:
        raise wrong(budget, numbers.Real)(
            f"`budget` is {shown(budget)}. Pass a number between 0 and 1, such as 0.01."
        )
    return WhenIdle(budget, check_optional_integer("max_steps", max_steps, 1))


class WhenIdle:
    """What `save_when_idle` returns; the manager tells it of each save."""

    def __init__(self, budget: float, max_steps: int | None) -> None:
        self._budget = budget
        self._max_steps = max_steps
        self._costs: deque[float] = deque(maxlen=_MEASURED)
        self._began = 0.0
        self._saving: Future[None] | None = None

    def __call__(self, step: int, last: int | None) -> bool:
        if not is_first():
            return False
        if self._max_steps is not None and step - (last or 0) >= self._max_steps:
            return True
        if self._saving is None:
            return True
        mean = sum(self._costs) / len(self._costs)
        is_cheap = mean <= self._budget * (time.monotonic() - self._began)
        return is_cheap and self._saving.done()

    def note(self, began: float, saving: Future[None]) -> None:
        """Note a call of `save` that ends now; one that failed at once cost nothing."""
        if isinstance(saving, Saving) or not self._costs:
            self._costs.append(time.monotonic() - began)
        self._began, self._saving = began, saving


def note_save(when: Iterable[When], began: float, saving: Future[None]) -> None:
    """Tell the functions of a manager of a call of `save` that ends now."""
    for function in when:
        if isinstance(function, WhenIdle):
            function.note(began, saving)
