"""Markdown tables of what was measured: ratios against the targets, and seconds."""

import importlib.metadata
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .measure import Result


OURS = "eqx_ckpt"
LISTING = "1000 steps"
MIB = 2**20

_GROUPS = {
    "best peer": (
        "equinox",
        "safetensors",
        "flax",
        "orbax",
        "orbax-files",
        "orbax-v1",
        "jax",
    ),
    "best orbax": ("orbax", "orbax-files", "orbax-v1"),
    "equinox": ("equinox",),
    "jax": ("jax",),
    "safetensors": ("safetensors",),
    "plain files": ("plain-files",),
    "limit": ("limit",),
}

# Workload, what is measured, and how many times the median of whom it may take.
_TARGETS = (
    ("A", "save", 1.3, "limit"),
    ("A", "save", 0.7, "best orbax"),
    ("A", "first", 0.2, "best peer"),
    ("A", "steady", 0.2, "best peer"),
    ("A", "steady", 2.0, "limit"),
    ("A", "cold", 0.6, "best peer"),
    ("A", "cold", 1.4, "limit"),
    ("B", "save", 1.3, "limit"),
    ("B", "save", 0.8, "safetensors"),
    ("B", "save", 0.6, "best orbax"),
    ("B", "first", 0.6, "best peer"),
    ("B", "steady", 0.9, "best peer"),
    ("B", "steady", 2.0, "limit"),
    ("B", "cold", 0.6, "best peer"),
    ("B", "cold", 1.4, "limit"),
    ("C", "save", 0.15, "best orbax"),
    ("C", "save", 2.5, "plain files"),
    ("C", "first", 0.2, "best orbax"),
    ("C", "steady", 0.08, "best orbax"),
    ("C", "steady", 0.9, "equinox"),
    ("C", "steady", 1.5, "plain files"),
    ("C", "cold", 0.25, "best orbax"),
    ("D", "steady", 0.6, "safetensors"),
    ("D", "cold", 0.6, "best peer"),
    ("E", "save", 1.2, "jax"),
    ("E", "first", 0.6, "best peer"),
    ("E", "steady", 0.3, "best peer"),
    ("E", "cold", 0.8, "best peer"),
    ("A", "blocked", 1.0, "best orbax"),
    ("B", "blocked", 1.0, "best orbax"),
    ("B", "blocked_step", 1.0, "best orbax"),
    ("C", "blocked", 0.3, "best orbax"),
)
_SAVE_PEAK = 64 * MIB
_IMPORT_SECONDS = 0.060
_MANAGED = 1.1
_LISTED_SECONDS = 1.0

_WORDS = {
    "save": "durable save",
    "first": "first restore",
    "steady": "steady restore",
    "cold": "cold restore",
    "save_peak": "memory of a save",
    "restore_peak": "memory of a restore",
}
_ASYNC_WORDS = {
    "blocked": "blocked by an async save",
    "blocked_first": "by the first one",
    "blocked_step": "with a step behind it",
    "durable": "until durable",
    "async_peak": "memory",
    "step_peak": "memory with the step",
}
_LISTING_WORDS = {
    "steps": "`steps()`",
    "latest": "`latest()`",
    "best": "`best()`",
    "best_again": "again",
    "save_alone": "save of the first step",
    "save_among": "of one more",
    "save_best": "with `keep_best`",
    "save_best_again": "again",
}
_TABLES = (_WORDS, _ASYNC_WORDS, _LISTING_WORDS)
_ALL_WORDS = _WORDS | _ASYNC_WORDS | _LISTING_WORDS


class Measured(NamedTuple):
    """The median of some measurements, with the smallest and the largest."""

    median: float
    low: float
    high: float

    def text(self, unit: float = 1.0, digits: int = 3) -> str:
        median, low, high = (f"{x / unit:.{digits}g}" for x in self)
        return median if low == high else f"{median} ({low}-{high})"


class Table:
    """All results of a run, to be asked for medians."""

    def __init__(self, results: Sequence[Result]):
        self._results = [r for r in results if "error" not in r]

    def measured(self, workload: str, key: str, peer: str) -> Measured | None:
        values = [
            r[key]
            for r in self._results
            if r["workload"] == workload and r["peer"] == peer and key in r
        ]
        if not values:
            return None
        return Measured(statistics.median(values), min(values), max(values))

    def best(self, workload: str, key: str, group: str) -> tuple[str, Measured] | None:
        """The fastest of a group."""
        found = [(p, self.measured(workload, key, p)) for p in _GROUPS[group]]
        there = [(p, m) for p, m in found if m is not None]
        return min(there, key=lambda pair: pair[1].median, default=None)


def ratios(results: Sequence[Result]) -> str:
    """Each target of the project, and whether this run reached it."""
    table = Table(results)
    rows = [
        *_time_rows(table),
        *_memory_rows(table),
        *_read_rows(table),
        *_manager_rows(table),
        *_import_rows(table),
    ]
    header = ("", "measured", "eqx_ckpt", "against", "ratio", "target", "reached")
    return markdown(header, rows)


def _time_rows(table: Table) -> Iterable[Sequence[str]]:
    for workload, key, factor, group in _TARGETS:
        mine = table.measured(workload, key, OURS)
        other = table.best(workload, key, group)
        if mine is None or other is None:
            continue
        peer, theirs = other
        ratio = mine.median / theirs.median
        yield (
            workload,
            _ALL_WORDS[key],
            f"{mine.text()} s",
            f"{group}: {theirs.text()} s" + (f" ({peer})" if peer != group else ""),
            f"{ratio:.2f}",
            f"<= {factor:g}",
            _yes(ratio <= factor),
        )


def _memory_rows(table: Table) -> Iterable[Sequence[str]]:
    for workload in ("A", "B", "C", "E"):
        size = table.measured(workload, "nbytes", OURS)
        for key in ("save_peak", "restore_peak"):
            peak = table.measured(workload, key, OURS)
            if peak is None or size is None:
                continue
            restored = 0.0 if key == "save_peak" else size.median
            above = peak.median - restored
            target = _SAVE_PEAK + restored / 10
            yield (
                workload,
                _WORDS[key],
                f"{above / MIB:.0f} MiB",
                "the tree" if key == "save_peak" else "the restored arrays",
                f"+{above / max(1, size.median):.0%}",
                f"<= {target / MIB:.0f} MiB",
                _yes(above <= target),
            )


def _read_rows(table: Table) -> Iterable[Sequence[str]]:
    read = table.measured("E", "read", OURS)
    size = table.measured("E", "nbytes", OURS)
    if read is not None and size is not None:
        yield (
            "E",
            "bytes that a restore reads",
            f"{read.text(MIB, 4)} MiB",
            f"bytes restored: {size.text(MIB, 4)} MiB",
            f"{read.median / size.median:.2f}",
            "",
            "",
        )


def _manager_rows(table: Table) -> Iterable[Sequence[str]]:
    for workload in ("B", "C"):
        managed = table.measured(workload, "managed", OURS)
        alone = table.measured(workload, "alone", OURS)
        if managed is None or alone is None:
            continue
        ratio = managed.median / alone.median
        yield (
            workload,
            "save by a manager",
            f"{managed.text()} s",
            f"the same without: {alone.text()} s",
            f"{ratio:.2f}",
            f"<= {_MANAGED:g}",
            _yes(ratio <= _MANAGED),
        )
    for key in ("steps", "latest"):
        listed = table.measured(LISTING, key, OURS)
        if listed is not None:
            yield (
                LISTING,
                _LISTING_WORDS[key],
                f"{listed.text()} s",
                "",
                "",
                f"<= {_LISTED_SECONDS:g} s",
                _yes(listed.median <= _LISTED_SECONDS),
            )


def _import_rows(table: Table) -> Iterable[Sequence[str]]:
    added = table.measured("import", "import", OURS)
    if added is not None:
        yield (
            "",
            "import",
            f"{added.text(1e-3)} ms",
            "import equinox",
            "",
            f"<= {_IMPORT_SECONDS * 1e3:.0f} ms",
            _yes(added.median <= _IMPORT_SECONDS),
        )


def _yes(reached: bool) -> str:
    return "yes" if reached else "**no**"


def seconds(results: Sequence[Result], workload: str) -> str:
    """Every peer on one workload: the medians with their ranges."""
    table = Table(results)
    of_it = [r for r in results if r["workload"] == workload and "error" not in r]
    tables: list[str] = []
    for words in _TABLES:
        found = [r for r in of_it if words.keys() & r.keys()]
        keys = [key for key in words if any(key in r for r in found)]
        rows = [
            (peer, *(_cell(table.measured(workload, key, peer), key) for key in keys))
            for peer in dict.fromkeys(r["peer"] for r in found)
        ]
        if rows:
            tables.append(markdown((workload, *map(_header, keys)), rows))
    return "\n".join(tables)


def _header(key: str) -> str:
    return f"{_ALL_WORDS[key]}, {'MiB' if key.endswith('peak') else 's'}"


def _cell(measured: Measured | None, key: str) -> str:
    if measured is None:
        return ""
    if key.endswith("peak"):
        return f"{measured.median / MIB:.0f}"
    return measured.text()


def growth(results: Sequence[Result], counts: Sequence[int]) -> str:
    """Microseconds for each leaf, as trees of small leaves grow."""
    table = Table(results)
    rows: list[Sequence[str]] = []
    for count in counts:
        found = [
            table.measured(f"C{count}", key, OURS)
            for key in ("save", "first", "steady")
        ]
        cells = [m.text(count * 1e-6) if m else "" for m in found]
        rows.append((f"{count}", *cells))
    header = ("leaves", "save, µs a leaf", "first restore", "steady restore")
    return markdown(header, rows)


def failures(results: Sequence[Result]) -> list[str]:
    """What could not be measured, each once."""
    return sorted(
        {
            f"{r['peer']}, {r['workload']}, {r['action']}: {r['error']}"
            for r in results
            if "error" in r
        }
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"
