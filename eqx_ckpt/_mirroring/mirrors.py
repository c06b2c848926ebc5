"""All mirrors of a run, as its manager sees them."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from .._distributed.jax_service import is_first
from .._distributed.process_group import Group, Solo
from .._steps.run_steps import check_places, Run
from .._types import PathLike, shown
from .mirror import Mirror
from .part_uploads import PartUploads
from .uploader import Uploader


class Mirrors:
    """The mirrors of a run; in a job, its first process uploads to them.

    **Attributes:**

    - `runs`: the run in each mirror.
    """

    def __init__(
        self,
        directory: PathLike,
        mirror: Mirror | Sequence[Mirror] | None,
        *,
        incremental: bool,
        is_shared: bool,
    ) -> None:
        given = checked_mirrors(mirror)
        self._uploaders: list[Uploader | PartUploads] = [
            Uploader(Run(directory), one, incremental)
            if is_shared
            else PartUploads(Run(directory), one, incremental)
            for one in given
        ]
        # The threads that upload have their own, as one remembers what it has listed.
        self.runs = [Run(one.path) for one in given]
        check_places([Run(directory), *self.runs], mirror)

    def begin(self) -> None:
        """Upload what an earlier manager has not."""
        for uploader in self._uploaders if is_first() else ():
            if isinstance(uploader, Uploader):
                uploader.begin()

    def ready(self, new_number: Callable[[], int]) -> list[tuple[int, int]]:
        """The mirrors to which parts of a step can be uploaded, each with a number.

        The number is that of the operation in which all processes do so.
        """
        return [
            (i, new_number())
            for i, uploader in enumerate(self._uploaders)
            if isinstance(uploader, PartUploads) and uploader.is_ready()
        ]

    def upload_parts(
        self, ready: Sequence[Sequence[int]], again: Callable[[str, int], Group | Solo]
    ) -> None:
        """Upload, in the background, with all processes."""
        for i, number in ready:
            uploader = self._uploaders[i]
            assert isinstance(uploader, PartUploads)
            uploader.begin(again(f"upload to {uploader.there.directory!r}", number))

    def saved(self, step: int, *, is_last: bool) -> None:
        for uploader in self._uploaders:
            uploader.saved(step, is_last=is_last)

    def deleted(self, step: int) -> None:
        for uploader in self._uploaders:
            uploader.deleted(step)

    def held(self, steps: Mapping[int, Any]) -> set[int]:
        """A `keep` for the local steps: of those that are to be uploaded."""
        return {step for uploader in self._uploaders for step in uploader.held()}

    def steps(self) -> list[int]:
        """The steps that are in any mirror."""
        return sorted({step for run in self.runs for step in run.steps()})

    def futures(self) -> dict[int, Future[None]]:
        found: dict[int, list[Future[None]]] = {}
        for uploader in self._uploaders:
            for step, future in uploader.futures().items():
                found.setdefault(step, []).append(future)
        return {step: _all_of(found[step]) for step in sorted(found)}

    def error(self) -> BaseException | None:
        """What fails now, in the first mirror in which something does."""
        errors = (uploader.error for uploader in self._uploaders)
        return next((error for error in errors if error is not None), None)

    def wait(self) -> None:
        for uploader in self._uploaders:
            uploader.wait()

    def close(self, *, waits: bool) -> None:
        try:
            if waits:
                self.wait()
        finally:
            for uploader in self._uploaders:
                uploader.end()


def checked_mirrors(mirror: Mirror | Sequence[Mirror] | None) -> list[Mirror]:
    """Validate `mirror`, and return all of them as a list."""
    if mirror is None:
        return []
    found: Any = [mirror] if isinstance(mirror, Mirror) else mirror
    is_list = isinstance(found, list | tuple)
    if not is_list or not all(isinstance(one, Mirror) for one in found):
        raise TypeError(
            f"`mirror` is {shown(mirror)}. Pass such as "
            "`eqx_ckpt.Mirror('s3://bucket/run')`, or several in a list; the default "
            "is none."
        )
    return [*found]


def _all_of(futures: Sequence[Future[None]]) -> Future[None]:
    """A future that ends with the last of some, with the first error of them."""
    if len(futures) == 1:
        return futures[0]
    joined = Future[None]()
    joined.set_running_or_notify_cancel()
    # Each number is given once, also to threads that end their uploads at once.
    ended = itertools.count(1)

    def note(_: Future[None]) -> None:
        if next(ended) < len(futures):
            return
        errors = [one.exception() for one in futures]
        error = next((e for e in errors if e is not None), None)
        if error is None:
            joined.set_result(None)
        else:
            joined.set_exception(error)

    for future in futures:
        future.add_done_callback(note)
    return joined
