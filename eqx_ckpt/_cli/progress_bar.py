"""Progress bars, on terminals only, and apart from the answer."""

import contextlib
import sys
from collections.abc import Callable, Generator

from .._format.display import printable
from .._progress import Progress


@contextlib.contextmanager
def bar() -> Generator[Callable[[str], Progress], None, None]:
    """A function from a label to the `progress` of a function of this package."""
    if not sys.stderr.isatty():
        yield lambda label: False
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress as Bars,
        TextColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Bars(*columns, TransferSpeedColumn(), console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def labelled(label: str) -> Progress:
            bars.reset(task, description=escape(printable(label)), total=None)

            def report(phase: str, leaf: str, done: int, total: int) -> None:
                bars.update(task, completed=done, total=total)

            return report

        yield labelled
