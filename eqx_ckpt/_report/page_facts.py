"""What the page knows, as one JSON value."""

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .._format.display import in_bytes
from .._format.leaf_record import scalar_to_text
from .._format.run_history import history_to_json
from .._inspecting.leaf_stats import LeafStats
from .._lazy import np
from .._steps.compare_histories import begun_by, in_marks, relations
from .._steps.metrics_log import MOST_METRICS
from .._steps.retention import numbers_in
from .._steps.run_config import as_json
from .alerts import find_alerts
from .histogram import Histogram
from .leaf_series import in_all, Seen
from .versions import Column, Columns, evenly


_STATS = ("count", "nan", "inf", "min", "max", "mean", "std", "norm")


# Of more, the page would be large, and nobody would look at them.
_MOST_METADATA = 2**16


_MOST_POINTS = 2_000


def facts_of(columns: Columns) -> dict[str, Any]:
    """Everything that is shown; reads all leaves of all columns."""
    found = columns.found
    leaves = [_leaf(columns.kind, name, seen) for name, seen in in_all(found)]
    metrics = {c.label: numbers_in(c.manifest.metadata) for c in found}
    metrics |= {str(step): dict(of) for step, of in columns.metrics.items()}
    notes = _notes(columns) if columns.kind == "run" else {}
    return {
        "kind": columns.kind,
        "title": columns.title,
        "columns": [
            _column(column)
            | {
                "notes": notes.get(column.label, []),
                "config": _config(columns, column),
            }
            for column in found
        ],
        "alerts": find_alerts(columns, leaves, metrics),
        "curve": _curve(columns),
        "leaves": leaves,
    }


def _config(columns: Columns, column: Column) -> Any:
    """The config of a column, unless the step that it goes on from has the same."""
    config = columns.configs.get(column.label)
    is_new = columns.config_changes.get(column.label) != {}
    return _shown(_json(config)) if config is not None and is_new else None


def _curve(columns: Columns) -> dict[str, Any]:
    """The metrics of a run, also of steps that have no column or were removed."""
    steps = [*evenly([*columns.metrics], _MOST_POINTS)]
    lines = _lines([columns.metrics[step] for step in steps])
    metrics = {name: [*map(_number, line)] for name, line in lines.items()}
    return {"steps": steps, "metrics": metrics}


def _notes(columns: Columns) -> dict[str, list[str]]:
    """What is unusual about steps of a run, by their labels.

    That is, where they come from, and that they share most of their bytes.
    """
    manifests = {int(column.label): column.manifest for column in columns.found}
    histories = {step: m.history for step, m in manifests.items() if m.history}
    notes = {
        str(step): in_marks(
            step, histories[step].step, relation, begun_by(histories[step])
        )
        for step, relation in relations(histories).items()
    }
    for label, changed in columns.config_changes.items():
        notes.setdefault(label, []).extend(
            f"{name}: {as_json(a)} → {as_json(b)}" for name, (a, b) in changed.items()
        )
    for step, manifest in manifests.items():
        own = columns.own_bytes.get(step)
        if own is not None and own < manifest.nbytes:
            notes.setdefault(str(step), []).append(
                f"its deletion frees {in_bytes(own)}"
            )
    return notes


def _column(column: Column) -> dict[str, Any]:
    manifest, history = column.manifest, column.manifest.history
    return {
        "label": column.label,
        "path": str(column),
        "checksums": column.has_checksums,
        "leaves": len(manifest.leaves),
        "nbytes": manifest.nbytes,
        "numbers": sum(math.prod(r.shape) for r in manifest.leaves.values()),
        "metadata": _shown(_json(manifest.metadata)),
        "versions": dict(manifest.versions),
        "history": None if history is None else history_to_json(history),
    }


def _shown(metadata: Any) -> Any:
    """Metadata, if they are short enough to be looked at."""
    size = len(json.dumps(metadata))
    return metadata if size <= _MOST_METADATA else f"{size:,} characters, not shown"


def _leaf(kind: str, name: str, versions: Sequence[Seen | None]) -> dict[str, Any]:
    there = [seen for seen in versions if seen is not None]
    first, last = there[0], there[-1]
    record, stats = last.record, last.stats
    numbers = [None if v is None else v.stats for v in versions]
    leaf: dict[str, Any] = {
        "name": name,
        "type": str(record),
        "dtype": record.dtype or f"Python {record.kind}",
        "shape": record.data_shape,
        "nbytes": record.nbytes,
        "status": _status(kind, versions),
        "sharding": record.sharding,
        "value": record.value,
        "stats": None if stats is None else _stats(stats),
        "histogram": _bins(last.histogram),
        "bad": [0 if n is None else n.nan + n.inf for n in numbers],
    }
    if len(versions) == 1:
        return leaf
    moved = [None if seen is None else seen.change for seen in versions[1:]]
    far = [None] * len(moved) if record.kind in ("key", "bytes") else moved
    return leaf | {
        "first": _bins(first.histogram) if first is not last else None,
        "norms": [None if n is None else _number(n.norm) for n in numbers],
        "changes": [None if c is None else _distance(c.norm) for c in far],
        "differ": None if moved[-1] is None else moved[-1].count,
        "largest": None if far[-1] is None else _distance(far[-1].largest),
    }


def _status(kind: str, versions: Sequence[Seen | None]) -> str:
    last = versions[-1]
    if last is None:
        return "only in A" if kind == "comparison" else "not in the last step"
    if last.problem:
        return last.problem
    if last.stats is not None and last.stats.nan + last.stats.inf:
        return "not finite"
    if kind != "comparison":
        return ""
    before = versions[0]
    if before is None:
        return "only in B"
    if str(before.record) != str(last.record):
        return f"was {before.record}"
    if before.problem:
        return f"{before.problem} in A"
    return "equal" if last.change is None or not last.change.count else "changed"


def _stats(stats: LeafStats) -> dict[str, Any]:
    return {name: _number(getattr(stats, name)) for name in _STATS}


def _bins(found: Histogram | None) -> dict[str, Any] | None:
    if found is None:
        return None
    width = math.ldexp(1.0, found.exponent)
    # A bin may begin before the smallest float.
    low = max(found.first * width, -sys.float_info.max)
    return {"low": low, "width": width, "counts": found.counts}


def _number(value: Any) -> Any:
    """A number with the digits that are shown; `None` if it is not finite."""
    if isinstance(value, np.generic):
        return str(value)
    if isinstance(value, complex):
        return f"{value:.6g}"
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, int) and abs(value) >= 2**1023:
        return scalar_to_text(value)
    return value


def _distance(value: float) -> Any:
    """A distance; `"inf"` where there is none, as from a number to a NaN."""
    return str(value) if math.isinf(value) else _number(value)


def _json(value: Any) -> Any:
    """Metadata, as a browser reads them: what is no number to it as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > 2**53:
        return str(value)
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value


def _lines(steps: Collection[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The metrics over the steps, by name."""
    found: dict[str, list[Any]] = {}
    for i, of_step in enumerate(steps):
        for name, value in of_step.items():
            if name in found or len(found) < MOST_METRICS:
                found.setdefault(name, [None] * len(steps))[i] = value
    return found
