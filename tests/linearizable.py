"""Whether what several processes saw of one place can have happened in some order.

After Wing and Gong, "Testing and Verifying Concurrent Objects" (1993).
"""

import math
from typing import NamedTuple


class Call(NamedTuple):
    """What a process did between two moments, and what came of it.

    - `kind`: `"save"`, `"overwrite"`, `"delete"` or `"read"`.
    - `value`: what was to be saved, or was read; `None` stands for nothing.
    - `outcome`: `"done"`; `"refused"`, because of what was there, or was not;
        `"failed"`; `"unknown"`, so that it takes effect from `begin` on, or never.
    - `is_doubtful`: it was refused or failed, but a request had no answer, so that it
        may have taken effect meanwhile.
    """

    kind: str
    begin: float
    end: float
    outcome: str
    value: int | None = None
    is_doubtful: bool = False


def find_order(calls: list[Call]) -> list[Call] | None:
    """An order in which each call is right, if first nothing is there; or `None`."""
    seen: set[tuple[frozenset[int], int | None, float]] = set()

    def search(
        left: frozenset[int], value: int | None, latest: float
    ) -> list[Call] | None:
        """`latest`: when the last one of those that came before began."""
        if all(_may_be_left_out(calls[i]) for i in left):
            return []
        if (left, value, latest) in seen:
            return None
        seen.add((left, value, latest))
        first = min(calls[i].end for i in left if not _may_be_left_out(calls[i]))
        for i in left:
            call = calls[i]
            end = math.inf if call.outcome == "unknown" else call.end
            if call.begin > first or end < latest:
                continue
            for after in _after(call, value):
                rest = search(left - {i}, after, max(latest, call.begin))
                if rest is not None:
                    return [call, *rest]
        return None

    return search(frozenset(range(len(calls))), None, -math.inf)


def _may_be_left_out(call: Call) -> bool:
    return call.is_doubtful or call.outcome in ("unknown", "failed")


def _after(call: Call, value: int | None) -> list[int | None]:
    """What can be there after a call, if this was there before."""
    kind, outcome = call.kind, call.outcome
    if kind == "read":
        return [value] if call.value == value else []
    found: list[int | None] = []
    if outcome == "refused" and (kind == "save") == (value is not None):
        found.append(value)
    # Of two that delete at a time, both may have seen the step, and then none.
    if (outcome in ("done", "unknown") or call.is_doubtful) and (
        kind != "save" or value is None
    ):
        found.append(call.value)
    return found
