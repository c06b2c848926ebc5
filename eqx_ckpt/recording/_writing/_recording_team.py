"""The processes that write one recording together; usually one."""

from collections.abc import Callable
from typing import Any

from ..._distributed.jax_service import is_alone, is_first
from ..._distributed.meeting import check_timeout
from ..._distributed.process_errors import failure_in, to_json, verdict
from ..._distributed.process_group import Group, group_of


class Team:
    """The processes of a job, which make the same calls, each within a deadline.

    **Attributes:**

    - `is_alone`: whether there is one process.
    - `is_first`: whether this process begins and commits.
    - `timeout`: the seconds that a process waits for the others before it raises.
    """

    def __init__(self, where: str, timeout: float) -> None:
        check_timeout(timeout)
        self._where = where
        self.timeout = timeout
        self.is_alone = is_alone()
        self.is_first = is_first()

    def from_first(
        self, what: str, make: Callable[[], Any], *, final: bool = False
    ) -> Any:
        """Return to all processes what the first one makes; if it fails, all raise.

        If `final`, it cannot be undone; see `Group`.
        """
        group = self._group(what)
        if group is None:
            return make()
        try:
            return group.from_first("recorded", make, final=final)
        finally:
            group.close()

    def combine(
        self, what: str, make: Callable[[], Any], of_all: Callable[[list[Any]], Any]
    ) -> Any:
        """Return to all processes what the first makes of what each one makes.

        If one fails, all raise.
        """
        group = self._group(what)
        if group is None:
            return of_all([make()])

        def judge(said: list[dict[str, Any]]) -> dict[str, Any]:
            found = verdict(said)
            if not found["failed"]:
                found["value"] = of_all([one["value"] for one in said])
            return found

        value, error = None, None
        try:
            try:
                value = make()
            except Exception as e:
                error = e
            failure = None if error is None else to_json(error)
            said = {"value": value, "error": failure}
            found = group.combine("recorded", said, judge)
        finally:
            group.close()
        if error := error or failure_in(found):
            raise error
        return found["value"]

    def _group(self, what: str) -> Group | None:
        if self.is_alone:
            return None
        return group_of(f"{what} of the recording {self._where}", self.timeout)
