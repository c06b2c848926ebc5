"""Report the progress of a save or a restore."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from ._types import shown


Progress: TypeAlias = bool | Callable[[str, str, int, int], Any]


"""`True` shows a bar; a function gets `(phase, leaf, bytes done, total bytes)`."""


def check_progress(progress: Progress) -> None:
    """Raise unless `progress` is valid, and tqdm is installed if it is needed."""
    if progress:
        Reporter(progress, 0)


class Reporter:
    """Calls the user's `progress` function, or shows a bar if it is `True`."""

    def __init__(self, progress: Progress, total: int) -> None:
        if progress is not True and not callable(progress):
            raise TypeError(
                f"`progress` is {shown(progress)}. Pass `True`, or a function `(phase, "
                "leaf, done, total)`."
            )
        self._report = progress if callable(progress) else _Bar()
        self._total = total
        self._done = 0

    def __call__(self, phase: str, leaf: str = "", nbytes: int = 0) -> None:
        """Report that `nbytes` more bytes of a leaf are done."""
        self._done += nbytes
        self._report(phase, leaf, self._done, self._total)

    def close(self) -> None:
        if isinstance(self._report, _Bar):
            self._report.close()


@contextlib.contextmanager
def reporting(progress: Progress, total: int) -> Generator[Reporter | None, None, None]:
    """A reporter, closed at the end; `None` without `progress`."""
    report = Reporter(progress, total) if progress else None
    try:
        yield report
    finally:
        if report is not None:
            report.close()


class _Bar:
    """A tqdm bar, labelled with the phase."""

    def __init__(self) -> None:
        try:
            import tqdm
        except ModuleNotFoundError:
            raise ImportError(
                "`progress=True` needs tqdm: `pip install 'eqx-ckpt[progress]'`. Or "
                "pass a function `(phase, leaf, done, total)`."
            ) from None
        self._new = lambda total: tqdm.tqdm(total=total, unit="B", unit_scale=True)
        self._bar: Any = None

    def __call__(self, phase: str, leaf: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = self._new(total)
        self._bar.set_description(phase, refresh=False)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
