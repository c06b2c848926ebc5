"""Which failures of saves a training survives."""

import contextlib
import logging
from collections.abc import Generator
from concurrent.futures import Future
from typing import get_args, Literal, TypeAlias

from .._errors import (
    CheckpointError,
    CheckpointExistsError,
    LeafMismatchError,
    LeafNameError,
)
from .._saving.background_save import raise_pending_failure, Saving
from .._steps.run_steps import Run
from .._types import check_optional_integer, check_word


logger = logging.getLogger("eqx_ckpt")


OnError: TypeAlias = Literal["raise", "warn"]


_MOST = 3


# What the next save would do wrong, too.
_MISTAKES = (CheckpointExistsError, LeafMismatchError, LeafNameError)


class FailedSaves:
    """Counts the saves of a manager that have failed in a row.

    **Attributes:**

    - `tried`: the last step that was tried, if failures are survived; not one whose
        arguments were wrong.
    """

    def __init__(self, run: Run, on_error: OnError, max_failures: int | None) -> None:
        self._run = run
        check_word("on_error", on_error, get_args(OnError))
        self._survives = on_error == "warn"
        most = check_optional_integer("max_failures", max_failures, 1)
        if most is not None and not self._survives:
            raise ValueError(
                "`max_failures` is for `on_error='warn'`: pass that, or leave "
                "`max_failures` out."
            )
        self._most = most or _MOST
        self._in_a_row = 0
        self._running: Saving | None = None
        # That of the last save, if it was logged only.
        self._survived: BaseException | None = None
        self._trying: int | None = None
        self.tried: int | None = None

    def __str__(self) -> str:
        """What all processes of a job have to pass."""
        if not self._survives:
            return ""
        return f", on_error='warn', max_failures={self._most}"

    def begin(self, step: int) -> None:
        """From now on, what fails is the save of this step."""
        if self._survives:
            self._trying = step

    @contextlib.contextmanager
    def checking_arguments(self) -> Generator[None]:
        """In it, a `CheckpointError` is about arguments, which is not survived."""
        try:
            yield
        except CheckpointError:
            self.over()
            raise

    def instead(self, error: Exception) -> Future[None]:
        """The future of a save that did not begin; raise if that is not survived."""
        if self._trying is None or isinstance(error, _MISTAKES):
            raise error
        self._survive(self._run.location(self._trying).url(), error)
        self.tried = self._trying
        failed = Future[None]()
        failed.set_exception(error)
        return failed

    def goes_on(self, saving: Saving) -> None:
        """The save that was begun goes on in the background."""
        if self._survives:
            self._running, self.tried = saving, self._trying

    def over(self) -> None:
        """From now on, what fails is not the save of a step."""
        self._trying = None

    def settle(self, owner: object) -> None:
        """Raise how the last save has ended, unless that is survived."""
        saving, self._running = self._running, None
        if not self._survives:
            raise_pending_failure(owner)
        elif saving is not None:
            error = saving.exception()
            if error is None:
                self._in_a_row, self._survived = 0, None
            else:
                self._survive(saving.what, error)

    def end(self) -> None:
        """Raise what was survived, if no later save has made up for it."""
        error, self._survived = self._survived, None
        if error is not None:
            error.add_note("It was the last save of this manager.")
            raise error

    def _survive(self, path: str, error: BaseException) -> None:
        self._survived = None
        is_failure = isinstance(error, OSError | CheckpointError)
        if not is_failure or isinstance(error, _MISTAKES):
            raise error
        self._in_a_row += 1
        if self._in_a_row > self._most:
            error.add_note(
                f"So many saves have failed in a row: {self._in_a_row}. The manager "
                f"survives {self._most}, as its `max_failures` says."
            )
            raise error
        self._survived = error
        logger.warning(
            "The save of %s failed; the training goes on (failure %d of at most %d in "
            "a row). %s: %s",
            path,
            self._in_a_row,
            self._most,
            type(error).__name__,
            str(error),
        )
