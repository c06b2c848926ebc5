"""The runs in a folder, one line each: a list, or a tree of forks."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import eqx_ckpt

from .._format.display import in_bytes, table
from .._format.run_history import Fork, History
from .._steps.compare_histories import in_words
from .._steps.retention import Mode, numbers_in, ranked
from .._steps.run_config import ABSENT, as_items, as_json as json_of, changes, Configs
from .._steps.run_steps import Run
from .._steps.runs_in_folder import best_of_runs, RunInFolder, runs_in
from .exit_status import DAMAGED, status_of
from .option_words import in_options
from .run_commands import (
    age_of,
    entry_of,
    ls as ls_run,
    summary,
    VANISHED,
)
from .terminal import number, say, say_json, Styled


# So many values of the configs have a column.
_MOST_SHOWN = 8


# So much of one has room in its column.
_MOST_TEXT = 20


def ls(
    path: str,
    best: str | None,
    mode: Mode,
    own: bool,
    mirror: str | None,
    as_json: bool,
) -> int:
    is_run = mirror is not None or Run(path).readable_or_not()
    runs = [] if is_run else runs_in(path)
    if not runs:
        return ls_run(path, best, mode, own, mirror, as_json)
    if own:
        raise eqx_ckpt.CheckpointError(
            f"{path!r} is a folder of runs, and `--own` is of the steps of one run. "
            f"Pass one of them: {os.fspath(runs[0].run.directory)!r}."
        )
    found, status = _entries(runs)
    if best is not None:
        status = max(status, _add_best(runs, found, best, mode, path))
    if as_json:
        say_json({"folder": path, "runs": found})
        return status
    titles = [
        "run",
        "newest",
        "age",
        "size",
        "steps",
        *([] if best is None else [best]),
        "",
    ]
    titles[-1:-1] = shown = _differing(found)
    lines = iter(table(titles, [_row(entry, best, shown) for entry in found]))
    say(Styled(next(lines), "dim"))
    for line, entry in zip(lines, found, strict=True):
        is_best = entry["best"] and entry["best"]["is_best"]
        say(Styled(line, "red" if entry["problem"] else "green" if is_best else None))
    return status


def log(path: str, as_json: bool) -> int:
    runs = runs_in(path)
    if not runs:
        if Run(path).readable_or_not():
            what = "It is one run: pass the folder that it is in."
        else:
            what = Run(path).explain()
        raise eqx_ckpt.CheckpointNotFoundError(
            f"There is no run in {path!r}. {what}".rstrip()
        )
    found, status = _entries(runs)
    if as_json:
        say_json({"folder": path, "runs": found})
        return status
    for indent, entry in _tree(found):
        parts = _about(entry)
        style = "red" if entry["problem"] else "bold"
        say(indent, Styled(entry["name"], style), "  ", ", ".join(parts))
    return status


def _entries(runs: Sequence[RunInFolder]) -> tuple[list[dict[str, Any]], int]:
    """What there is to say of each run, and the exit status."""
    status = 0
    found: list[dict[str, Any]] = []
    for name, run, steps in runs:
        newest, problem = entry_of([run], steps[-1])
        config, why = _config(run, newest["history"])
        problem = problem or why
        if problem is not None:
            newest["problem"] = in_options(problem)
            status = max(status, status_of(problem))
        for unusable in run.unusable():
            newest["problem"] = newest["problem"] or in_options(unusable.problem)
            status = max(status, DAMAGED)
        history = newest.pop("history")
        fork = history and history.forked
        about = ("saved", "nbytes", "metadata", "problem")
        found.append(
            {
                "name": name,
                "path": run.directory,
                "id": history and history.run,
                "steps": len(steps),
                "newest": newest["step"],
                **{key: newest[key] for key in about},
                "config": config,
                "forked": fork and {"run": fork.run, "step": fork.step},
                "best": None,
            }
        )
    names = {entry["id"]: entry["name"] for entry in reversed(found)}
    for entry in found:
        if fork := entry["forked"]:
            fork["name"] = fork["run"] and names.get(fork["run"])
    return found, status


def _add_best(
    runs: Sequence[RunInFolder],
    found: list[dict[str, Any]],
    metric: str,
    mode: Mode,
    path: str,
) -> int:
    """Add the best step of each run, mark the best run, and return the status.

    A step that cannot be read may be better: it is a problem of its run.
    """
    status = 0
    of_all: dict[tuple[int, int], Any] = {}
    for place, (_, run, steps) in enumerate(runs):
        metadata, problems = _metadata(run, steps)
        for problem in problems:
            found[place]["problem"] = found[place]["problem"] or in_options(problem)
            status = max(status, status_of(problem))
        for step in ranked(metadata, metric, mode)[:1]:
            value = numbers_in(metadata[step])[metric]
            found[place]["best"] = {"step": step, "value": value, "is_best": False}
        of_all |= {(place, step): one for step, one in metadata.items()}
    place, _ = best_of_runs(of_all, metric, mode, Run(path).directory)
    found[place]["best"]["is_best"] = True
    return status


def _metadata(run: Run, steps: Sequence[int]) -> tuple[dict[int, Any], list[Exception]]:
    """The metadata of steps, and why those of others cannot be read."""
    found: dict[int, Any] = {}
    problems: list[Exception] = []
    for step in steps:
        try:
            found[step] = run.stored.metadata(step)
        except VANISHED:
            continue
        except (eqx_ckpt.CheckpointError, OSError) as e:
            problems.append(e)
    return found, problems


def _config(
    run: Run, history: History | None
) -> tuple[dict[str, Any] | None, Exception | None]:
    """The config of a step with a history, and why it cannot be read."""
    try:
        return history and Configs([run.place]).of(history), None
    except (eqx_ckpt.CheckpointError, OSError) as e:
        return None, e


def _differing(found: Sequence[dict[str, Any]]) -> list[str]:
    """The names of the first values of the configs in which the runs differ."""
    configs = [entry["config"] for entry in found]
    names = {name: None for config in configs for name in changes(configs[0], config)}
    return [*names][:_MOST_SHOWN]


def _row(entry: dict[str, Any], metric: str | None, shown: Sequence[str]) -> list[str]:
    best = entry["best"]
    size = "-" if entry["nbytes"] is None else in_bytes(entry["nbytes"])
    row = [entry["name"], str(entry["newest"]), age_of(entry), size]
    row.append(str(entry["steps"]))
    if metric is not None:
        at = best and f"{number(best['value'])} at {best['step']}"
        row.append(at or "-")
    config = dict(as_items(entry["config"] or {}))
    values = [config.get(name, ABSENT) for name in shown]
    row += [_cell(one) for one in values]
    marks = ["best"] if best and best["is_best"] else []
    marks += [_from(entry["forked"])] if entry["forked"] else []
    return [*row, summary(marks, entry)]


def _cell(value: Any) -> str:
    """A value of a config, which may be long: its end, where paths differ."""
    text = json_of(value)
    return text if len(text) <= _MOST_TEXT else f"...{text[-_MOST_TEXT:]}"


def _from(fork: dict[str, Any]) -> str:
    return in_words(Fork(fork["run"], fork["step"], digest=""), fork["name"])


def _about(entry: dict[str, Any]) -> list[str]:
    steps = f"{entry['steps']} step{'s' * (entry['steps'] != 1)}"
    parts = [f"step {entry['newest']}", steps]
    if entry["nbytes"] is not None:
        parts.append(in_bytes(entry["nbytes"]))
    if entry["forked"]:
        parts.append(_from(entry["forked"]))
    if entry["problem"]:
        parts.append(entry["problem"].split("\n")[0])
    return parts


def _tree(found: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The runs, each below the one that it was forked from, with what is before it."""
    left = {entry["name"]: entry for entry in found}
    above = {entry["name"]: (entry["forked"] or {}).get("name") for entry in found}
    # What a forged history has made its own ancestor comes last.
    for top in sorted(left, key=lambda name: above[name] is not None):
        waiting = [(top, "", "")] if top in left else []
        while waiting:
            name, before, below = waiting.pop()
            yield before, left.pop(name)
            forks = [fork for fork in left if above[fork] == name]
            for fork in reversed(forks):
                is_last = fork == forks[-1]
                corner, line = ("└── ", "    ") if is_last else ("├── ", "│   ")
                waiting.append((fork, below + corner, below + line))
