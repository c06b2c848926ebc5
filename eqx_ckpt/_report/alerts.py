"""What stands at the top of the page: damage, NaNs and infinities."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .versions import Column, Columns


_MOST_NAMED = 50


_MOST_REASONS = 3


_MOST_STEPS = 5


def find_alerts(
    columns: Columns,
    leaves: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Each has its `text`, the `leaves` that it is about, and whether it is about
    something `unreadable`, which may be intact. The metrics are by version, also of
    steps that have no column."""
    versions = columns.found
    found = [_alert(text, unreadable=is_so) for text, is_so in columns.problems]
    for column in versions:
        if column.damage:
            found.append(_of_leaves("damaged", column, column.damage))
        if column.unreadable:
            found.append(_of_leaves("unreadable", column, column.unreadable))
    bad = [leaf for leaf in leaves if any(leaf["bad"])]
    if bad:
        where = {i for leaf in bad for i, count in enumerate(leaf["bad"]) if count}
        names = [leaf["name"] for leaf in bad]
        has = "leaf has" if len(bad) == 1 else "leaves have"
        text = f"{len(bad):,} {has} NaNs or infinities"
        found.append(
            _alert(text + _within([versions[i].label for i in sorted(where)]), names)
        )
    bad_at: dict[str, list[str]] = {}
    for label, of_version in metrics.items():
        for name, value in of_version.items():
            if _is_bad(value):
                bad_at.setdefault(name, []).append(label)
    for name, labels in bad_at.items():
        found.append(_alert(f"The metric {name!r} is not finite{_within(labels)}"))
    return found


def _alert(
    text: str, leaves: Sequence[str] = (), *, unreadable: bool = False
) -> dict[str, Any]:
    return {"text": text, "leaves": leaves[:_MOST_NAMED], "unreadable": unreadable}


def _of_leaves(what: str, column: Column, why: Mapping[str, str]) -> dict[str, Any]:
    reasons = [f"{name}: {reason}" for name, reason in why.items()]
    more = "; ..." if len(why) > _MOST_REASONS else ""
    are = "leaf is" if len(why) == 1 else "leaves are"
    text = f"{len(why):,} {are} {what}{_within([column.label])}: "
    text += "; ".join(reasons[:_MOST_REASONS]) + more
    return _alert(text, [*why], unreadable=what == "unreadable")


def _within(labels: Sequence[str]) -> str:
    """In which versions; nothing if there is only one."""
    if not any(labels):
        return ""
    more = ", ..." if len(labels) > _MOST_STEPS else ""
    return f", in {', '.join(labels[:_MOST_STEPS])}{more}"


def _is_bad(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
