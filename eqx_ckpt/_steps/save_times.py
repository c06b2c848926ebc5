"""Decide when to save: functions of a step and the last saved step; and SIGTERM."""

import numbers
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeAlias

import numpy as np

from .._errors import CheckpointError
from .._types import check_integer, is_real, shown, wrong


When: TypeAlias = Callable[[int, int | None], bool]


"""A function `(step, last) -> bool`: whether to save `step`, the last being `last`."""


# The watchers, and the signal handler to restore when there are none left.
_watchers: set[object] = set()


_previous: list[Any] = []


_told = threading.Event()


def save_every_steps(n: int) -> When:
    """Save the steps that are multiples of `n`.

    If the loop skips such a step, the next step is saved instead.

    **Arguments:**

    - `n`: the distance between saved steps, at least 1.

    **Returns:**

    A function for the `when` of [`eqx_ckpt.CheckpointManager`][].

    **Raises:**

    - `ValueError`: `n` is not a positive integer.

    !!! example

        ```python
        import eqx_ckpt

        when = eqx_ckpt.save_every_steps(1000)
        assert when(1000, None) and when(2000, 1000)
        assert not when(1999, 1000)
        ```
    """
    n = check_integer("n", n, 1)
    return lambda step, last: step // n > (last or 0) // n


def save_every_seconds(seconds: int | float) -> When:
    """Save when `seconds` have passed since the first call after the last save.

    **Arguments:**

    - `seconds`: the time between two saves, a positive number.

    **Returns:**

    A function for the `when` of [`eqx_ckpt.CheckpointManager`][]. It has its own clock:
    create one for each manager.

    **Raises:**

    - `ValueError`: `seconds` is not a positive number.

    !!! example

        ```python
        import eqx_ckpt

        when = eqx_ckpt.save_every_seconds(600)
        assert not when(1, None)  # The clock starts here.
        ```
    """
    if not is_real(seconds) or not seconds > 0:
        raise wrong(seconds, numbers.Real)(
            f"`seconds` is {shown(seconds)}. Pass a positive number of seconds."
        )
    newest: int | None = None
    start = time.monotonic()

    def when(step: int, last: int | None) -> bool:
        nonlocal newest, start
        if last != newest:
            newest, start = last, time.monotonic()
        return time.monotonic() - start >= seconds

    return when


def checked_when(when: When | Iterable[When] | None) -> list[When]:
    """Validate `when`, and return its functions as a list."""
    if when is None:
        return []
    found: Any = [when] if callable(when) else when
    if not isinstance(found, Iterable) or not all(map(callable, found := [*found])):
        raise TypeError(
            f"`when` is {shown(when)}. Pass a function such as "
            "`save_every_steps(1000)`, or several in a list; the default is none."
        )
    return found


def is_due(functions: Iterable[When], step: int, last: int | None) -> bool:
    """Whether any function returns `True`; all of them are called."""
    answers: list[Any] = [function(step, last) for function in functions]
    for answer in answers:
        if not isinstance(answer, bool | np.bool_):
            raise CheckpointError(
                f"A function of `when` returned {shown(answer)} for step {step}. It "
                "has to return `True` or `False`."
            )
    return any(answers)


def caught_sigterm(watcher: object) -> bool:
    """Catch SIGTERM from the first call on; return whether it has arrived."""
    if not _watchers:
        try:
            before = signal.signal(signal.SIGTERM, _note)
        except ValueError:
            raise CheckpointError(
                "`should_save` waits for SIGTERM, which Python allows in the main "
                "thread only. Call it there."
            ) from None
        if before is not _note:  # It is, if the last one was not closed there.
            _previous[:] = [before]
        _told.clear()
    _watchers.add(watcher)
    return _told.is_set()


def stop_watching(watcher: object) -> None:
    """Restore the previous handler of SIGTERM when the last watcher has stopped.

    Python allows that in the main thread only. Elsewhere, the next SIGTERM does it.
    """
    if watcher in _watchers:
        _watchers.discard(watcher)
        if not _watchers and threading.current_thread() is threading.main_thread():
            _restore()


def _restore() -> None:
    signal.signal(signal.SIGTERM, _previous.pop() or signal.SIG_DFL)


def _note(number: int, frame: FrameType | None) -> None:
    if _watchers:
        _told.set()
    else:
        _restore()
        signal.raise_signal(number)
