"""What stands at the top of the page: damage, NaNs and infinities."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .columns import Column, Columns


_MOST_NAMED = 50
_MOST_REASONS = 3
_MOST_STEPS = 5


def shouts(
    columns: Columns,
    leaves: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Sequence[Any]],
) -> list[dict[str, Any]]:
    """Each with its `text`, and the `leaves` that it is about."""
    found = columns.found
    problems = [_shout(problem, []) for problem in columns.problems]
    damaged = [_of_damage(column) for column in found if column.damage]
    bad = [leaf for leaf in leaves if any(leaf["bad"])]
    if bad:
        where = {i for leaf in bad for i, count in enumerate(leaf["bad"]) if count}
        names = [leaf["name"] for leaf in bad]
        has = "leaf has" if len(bad) == 1 else "leaves have"
        text = f"{len(bad):,} {has} NaNs or infinities"
        damaged.append(_shout(text + _within([found[i] for i in sorted(where)]), names))
    for name, line in metrics.items():
        where = [c for c, value in zip(found, line, strict=True) if _is_bad(value)]
        if where:
            damaged.append(_shout(f"The metric {name!r} is not finite{_within(where)}"))
    return problems + damaged


def _shout(text: str, leaves: Sequence[str] = ()) -> dict[str, Any]:
    return {"text": text, "leaves": leaves[:_MOST_NAMED]}


def _of_damage(column: Column) -> dict[str, Any]:
    count = len(column.damage)
    reasons = [f"{name}: {why}" for name, why in column.damage.items()]
    more = "; ..." if count > _MOST_REASONS else ""
    are = "leaf is" if count == 1 else "leaves are"
    text = f"{count:,} {are} damaged{_within([column])}: "
    return _shout(text + "; ".join(reasons[:_MOST_REASONS]) + more, [*column.damage])


def _within(columns: Sequence[Column]) -> str:
    """In which versions; nothing if there is only one."""
    labels = [column.label for column in columns if column.label]
    if not labels:
        return ""
    more = ", ..." if len(labels) > _MOST_STEPS else ""
    return f", in {', '.join(labels[:_MOST_STEPS])}{more}"


def _is_bad(value: Any) -> bool:
    return value is not None and not math.isfinite(value)
