"""Commands for checkpoints."""

import dataclasses
import functools as ft
import math
import sys
from collections.abc import Iterator
from typing import Any

import eqx_ckpt

from .._format.display import columns_of, in_bytes, table
from .._format.source import Source
from .._inspecting.leaf_diff import differences
from .._inspecting.leaf_stats import LeafStats, stats_and_damage
from .._inspecting.tree_diff import LeafDiff
from .._lazy import Array, np
from .._steps.run_config import as_json as json_of, changes
from .._storage.locate import is_web
from .command_sources import found_at, newest_at, reading
from .option_words import in_options
from .terminal import (
    bar,
    columns,
    number,
    say,
    say_json,
    say_problem,
    Styled,
)
from .value_diff import part_of, split_index


_MOST_VALUES = 1000


# Where the output is no terminal.
_WIDTH = 80


_COLORS = {"only in a": "red", "only in b": "green"}


def show(path: str, text: str, as_json: bool) -> int:
    name, index = split_index(text)
    record, part, stats = reading(path, lambda source: part_of(source, name, index))
    counts, edges = _histogram(_finite(part))
    found = dataclasses.asdict(stats)
    if as_json:
        shown = part if part.size <= _MOST_VALUES else None
        if shown is not None and shown.dtype.kind in "mM":
            shown = shown.astype(str)
        elif shown is not None and shown.dtype.kind not in "biufcO":
            shown = shown.astype(np.float64)
        values = None if shown is None else np.asarray(shown).tolist()
        histogram = {"counts": counts, "edges": edges}
        about = {"path": path, "name": name, "type": str(record), "values": values}
        say_json(about | {"stats": found, "histogram": histogram})
        return 0
    title = Styled(text if index else name, "bold")
    of = "of " if index else ""
    say(title, f"  {of}{record}  {in_bytes(record.nbytes)}")
    for key, stat in found.items():
        is_bad = key in ("nan", "inf") and stat
        say(f"{key:>6}  ", Styled(number(stat), "red" if is_bad else None))
    width = columns() or _WIDTH
    for line in _written(part, width).split("\n"):
        say(line)
    for line in _bars(counts, edges, width):
        say(*line)
    return 0


def _written(part: Array, width: int) -> str:
    if part.dtype.kind == "O":
        return number(part.item())
    return np.array2string(part, threshold=100, max_line_width=width)


def _bars(
    counts: list[int], edges: list[float], width: int
) -> Iterator[list[str | Styled]]:
    """A histogram: where each bin begins, how many are in it, and a bar."""
    longest = max(10, min(60, width - 24))
    for count, low in zip(counts, edges[:-1], strict=True):
        # Eighths of a character, so that few of many can be seen.
        eighths = math.ceil(8 * longest * count / max(counts))
        bar = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
        line = f"{number(low):>12} {count:>9}"
        yield [line, " ", Styled(bar, "cyan")] if bar else [line]
    if edges:
        yield [f"{number(edges[-1]):>12}"]


def _histogram(wide: Array) -> tuple[list[int], list[float]]:
    """Counts and edges of ten bins, or of one if the range is too small or too
    large."""
    if wide.size == 0:
        return [], []
    low, high = float(wide.min()), float(wide.max())
    finest = max(1e-9 * max(abs(low), abs(high)), sys.float_info.min)
    if not finest < high - low < np.inf:
        return [wide.size], [low, high]
    counts, edges = np.histogram(wide, 10)
    return counts.tolist(), edges.tolist()


def _finite(part: Array) -> Array:
    """The finite numbers of an array, as floats; none of an integer beyond 64 bits."""
    if part.dtype.kind in "cmMO":
        return np.empty(0)
    wide = part.astype(np.float64).reshape(-1)
    return wide[np.isfinite(wide)]


def stats(path: str, prefix: str, only_bad: bool, as_json: bool) -> int:
    found, damage = reading(path, lambda source: _stats(source, prefix))
    bad = [name for name, leaf in found.items() if leaf.nan or leaf.inf]
    if only_bad:
        found = {name: found[name] for name in bad}
    if as_json:
        leaves = [{"name": n} | dataclasses.asdict(leaf) for n, leaf in found.items()]
        say_json({"path": path, "leaves": leaves, "damage": damage})
    else:
        for line in _stats_lines(found) if found or not only_bad else ():
            say(line)
        for name in bad:
            say(Styled(f"NaN or infinity: {name}", "red"))
        for name, problem in damage.items():
            say_problem(f"damaged: {name}: {problem}")
    return 1 if bad or damage else 0


def _stats(source: Source, prefix: str) -> tuple[dict[str, LeafStats], dict[str, str]]:
    damage: dict[str, str] = {}
    return stats_and_damage(source, prefix, damage), damage


def _stats_lines(found: dict[str, LeafStats]) -> Iterator[str | Styled]:
    """A table, or a paragraph for each leaf where that is too wide for the terminal."""
    fields = [field.name for field in dataclasses.fields(LeafStats)]
    rows = [
        [name, *(number(getattr(leaf, field)) for field in fields), ""]
        for name, leaf in found.items()
    ]
    lines = list(table(["leaf", *fields, ""], rows))
    width = columns()
    if width is None or max(map(columns_of, lines)) <= width:
        yield Styled(lines[0], "dim")
        yield from lines[1:]
        return
    for name, *values, _ in rows:
        yield Styled(name, "bold")
        for field, value in zip(fields, values, strict=True):
            if value != "-":
                yield f"{field:>7}  {value}"


def digest(path: str, as_json: bool) -> int:
    with bar() as progress:
        found = eqx_ckpt.inspect.digest(found_at(path), progress=progress(path))
    if as_json:
        say_json({"path": path, "digest": found})
    else:
        say(found, is_cropped=False)
    return 0


def _as_entry(name: str, leaf: LeafDiff) -> dict[str, Any]:
    entry = {"name": name} | dataclasses.asdict(leaf)
    if not leaf.count:
        for field in ("count", "max_abs", "max_rel", "norm_rel"):
            del entry[field]
    return entry


def _config_at(path: str, damaged: dict[str, str]) -> dict[str, Any] | None:
    """The config of what may be a step; if it is damaged, say so."""
    if is_web(path):
        return None
    try:
        return eqx_ckpt.inspect.read_config(path)
    except eqx_ckpt.CheckpointNotFoundError:
        return None
    except (eqx_ckpt.CheckpointError, OSError) as e:
        damaged[f"the config of {path}"] = str(e)
        return None


def diff(a: str, b: str, prefix: str, how: dict[str, bool], as_json: bool) -> int:
    given, (a, b) = (a, b), (newest_at(a), newest_at(b))
    compare = ft.partial(differences, prefix=prefix, **how)
    differing, damaged = reading(
        a, lambda first: reading(b, lambda second: compare(first, second))
    )
    configs = [_config_at(path, damaged) for path in (a, b)]
    config = {
        name: [*map(json_of, values)] for name, values in changes(*configs).items()
    }
    damage = {name: in_options(problem) for name, problem in damaged.items()}
    found = [_as_entry(name, leaf) for name, leaf in differing.items()]
    if as_json:
        same = not found and not damage
        compared = {f"compared_{name}": flag for name, flag in how.items()}
        about: dict[str, Any] = {"a": a, "b": b, "prefix": prefix} | compared
        about["compared"] = differing.compared
        about |= {"same": same, "config": config}
        say_json(about | {"leaves": found, "damage": damage})
        return 0 if same else 1
    if given != (a, b):
        say(Styled(f"{a} and {b}:", "dim"))
    for name, (before, after) in config.items():
        say(Styled(f"config {name}: {before} → {after}", "dim"), is_cropped=False)
    for entry in found:
        text = f"{entry['name']}: {entry['status']}"
        if "count" in entry:
            text += f": {entry['count']} differ, at most {number(entry['max_abs'])}"
            if entry["max_rel"] is not None:
                text += f", relative {number(entry['max_rel'])}"
            if entry["norm_rel"] is not None:
                text += f", norm {number(entry['norm_rel'])}"
        elif entry["a"] and entry["b"]:
            text += f": {entry['a']}, {entry['b']}"
        else:
            text += f": {entry['a'] or entry['b']}"
        # It may be longer than a line, and none of it is left out.
        say(Styled(text, _COLORS.get(entry["status"])), is_cropped=False)
    if found:
        say(Styled(differing.summary, "dim"))
    for problem in damage.values():
        say_problem(problem)
    return 1 if found or damage else 0
