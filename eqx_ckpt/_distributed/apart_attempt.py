"""A step of which each process of a job saves its part, on a disk of its own."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from .._errors import CheckpointError, LeafMismatchError
from .._storage.interface.free_space import WhyTooFew
from .._storage.interface.place import Attempt, Storage
from .._tree.plans.write_plan import Write
from .._types import Checksums, Layout
from .joint_attempt import agreed, LateAttempt, Together
from .process_errors import failure_in, to_json, verdict
from .process_group import Group, Solo


class Apart(Together):
    """The processes of a job that save one step, as a context.

    What fails in one of them, they all raise.

    **Attributes:**

    - `combine`, `new_number`, `again`: as those of the group.
    - `index`, `size`: which process this is, and of how many.
    """

    def __init__(self, group: Group | Solo) -> None:
        super().__init__(group)
        self.combine, self.again = group.combine, group.again
        self.new_number = group.new_number
        self.index, self.size = group.index, group.size
        # At which topic the others wait for this process.
        self._topic = "plan"
        self._alike: Mapping[str, str] = {}
        self._undo: Callable[[], None] = lambda: None

    def agree(
        self, place: str, writes: Sequence[Write]
    ) -> tuple[list[Write], dict[str, int]]:
        """Agree on what is saved; return what this process would write of it alone."""
        owned, places = agreed(self._group, place, writes, None)
        self._topic = "written"
        return owned, places

    def prepare(self, alike: Mapping[str, str], undo: Callable[[], None]) -> None:
        """Say which arrays are the same in all processes, and what undoes a commit."""
        self._alike, self._undo = alike, undo

    def begin(
        self,
        target: Storage,
        layout: Layout,
        overwrite: bool,
        writes: Sequence[Write],
        why_too_few: WhyTooFew,
    ) -> tuple[Attempt, list[Write]]:
        arrays = [write for write in writes if write.leaf is not None]
        names = [write.name for write in arrays]

        def begin() -> Attempt:
            return target.begin(
                layout, names, overwrite=overwrite, why_too_few=why_too_few
            )

        self._topic = ""
        return PartAttempt(self._group, begin, self._alike, self._undo), arrays

    def _report_failure(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and self._topic:
            with contextlib.suppress(CheckpointError):
                said = {"error": to_json(error)}
                self._group.combine(self._topic, said, verdict)


class PartAttempt(LateAttempt):
    """The attempt of one process; none commits before all have written.

    If one of them says that it cannot commit, the others take theirs back.
    """

    def __init__(
        self,
        group: Group | Solo,
        make: Callable[[], Attempt],
        alike: Mapping[str, str],
        undo: Callable[[], None],
    ) -> None:
        super().__init__()
        self._group = group
        self._make = make
        self._alike = alike
        self._undo = undo
        self._topic = "written"
        self._attempt: Attempt | None = None

    def _begin(self) -> None:
        self._attempt = attempt = self._stack.enter_context(self._make())
        self.chunks, self.root = attempt.chunks, attempt.root

    def gather(self, checksums: Checksums) -> None:
        alike: dict[str, dict[str, Any]] = {}
        for name, leaf in self._alike.items():
            alike.setdefault(leaf, {})[name] = checksums[name]
        if failure := self._exchange({"error": None, "alike": alike}, _alike):
            raise failure
        self._topic = "committed"

    def commit(self, manifest: bytes) -> None:
        assert self._attempt is not None
        self._attempt.commit(manifest)
        # If it is not known how the others have ended, it stays: nobody takes it for
        # a step unless they have all committed.
        if failure := self._exchange({"error": None}):
            self._undo()
            raise failure

    def _exchange(
        self,
        said: dict[str, Any],
        make: Callable[[list[Any]], dict[str, Any]] = verdict,
    ) -> Exception | None:
        topic, self._topic = self._topic, ""
        return failure_in(self._group.combine(topic, said, make))

    def _report_failure(self, error: BaseException) -> None:
        if self._topic:
            with contextlib.suppress(CheckpointError):
                self._exchange({"error": to_json(error)})


def _alike(said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Who has failed; raise if nobody has, and the processes do not save the same."""
    found = verdict(said)
    if not found["failed"]:
        check_alike([value["alike"] for value in said])
    return found


def check_alike(values: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless each process says the same of its own leaves."""
    for index, other in enumerate(values):
        for name, value in values[0].items():
            if other.get(name) != value:
                raise LeafMismatchError(
                    f"Leaf {name!r} of process {index} is not that of process 0, and "
                    "each has it for itself. In the mirror there is only that of "
                    "process 0. Nothing was saved. Make it the same in all processes, "
                    "or make it a part of a global array."
                )
