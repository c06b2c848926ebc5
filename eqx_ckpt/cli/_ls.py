"""The steps of a run."""

import datetime
import os
from typing import Any

import eqx_ckpt

from .._format.screen import in_bytes
from .._retention import Mode, ranked
from .._steps import Run
from .._types import is_real
from ._guard import DAMAGED, status_of
from ._output import number, say, say_json, Styled, table
from ._words import in_options


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def ls(path: str, best: str, mode: Mode, as_json: bool) -> int:
    run = Run(path)
    status = 0
    found: list[dict[str, Any]] = []
    for step in steps_of(run):
        entry, problem = _entry(run, step)
        if isinstance(problem, eqx_ckpt.CheckpointNotFoundError | FileNotFoundError):
            continue  # It has vanished meanwhile.
        if problem is not None:
            entry["problem"] = in_options(problem)
            status = max(status, status_of(problem))
        found.append(entry)
    newest = found[-1] if found else None
    for stranger in run.strangers():
        entry = _described(stranger.step, stranger.path)
        found.append(entry | {"problem": in_options(stranger.problem)})
        status = DAMAGED
    first = _best(found, best, mode) if best else None
    for entry in found:
        entry["latest"] = entry is newest
        entry["best"] = entry["step"] == first
    if as_json:
        say_json({"run": run.directory, "steps": found})
        return status
    lines = iter(table(("step", "age", "size", "leaves", ""), map(_row, found)))
    say(Styled(next(lines), "dim"))
    for line, entry in zip(lines, found, strict=True):
        color = "red" if entry["problem"] else "green" if entry["best"] else None
        say(Styled(line, color))
    return status


def _best(found: list[dict[str, Any]], metric: str, mode: Mode) -> int:
    metrics = {entry["step"]: entry["metadata"] for entry in found}
    for step in ranked(metrics, metric, mode):
        return step
    known = dict.fromkeys(
        key
        for metadata in metrics.values()
        if isinstance(metadata, dict)
        for key, value in metadata.items()
        if is_real(value)
    )
    there = ", ".join(map(repr, known)) or "none"
    raise eqx_ckpt.CheckpointError(
        f"`--best {metric}`: none of the {len(found)} steps has a number {metric!r} in "
        f"its metadata, other than NaN. The numbers there are {there}."
    )


def steps_of(run: Run) -> list[int]:
    """The steps of a run; raise if there is none."""
    steps = run.readable_or_not()
    if not steps:
        raise eqx_ckpt.CheckpointNotFoundError(
            f"There is no step in {run.directory!r}. {run.explain()}".rstrip()
        )
    return steps


def _entry(run: Run, step: int) -> tuple[dict[str, Any], Exception | None]:
    """What there is to say of a step, and why it cannot be read."""
    path = os.fspath(run.path(step))
    entry = _described(step, path)
    try:
        if os.path.exists(path):
            entry["saved"] = os.stat(f"{path}/zarr.json").st_mtime
        manifest = eqx_ckpt.read_manifest(run.path(step))
    except (eqx_ckpt.CheckpointError, OSError) as e:
        return entry, e
    entry |= {"nbytes": manifest.nbytes, "leaves": len(manifest.leaves)}
    return entry | {"metadata": manifest.metadata}, None


def _described(step: int, path: str) -> dict[str, Any]:
    """An entry of which nothing else is known."""
    unknown = dict.fromkeys(("saved", "nbytes", "leaves", "metadata", "problem"))
    return {"step": step, "path": path, **unknown}


def _row(entry: dict[str, Any]) -> list[str]:
    marks = [mark for mark in ("latest", "best") if entry[mark]]
    notes = f"[{', '.join(marks)}] " if marks else ""
    metadata = entry["metadata"]
    if entry["problem"]:
        notes += entry["problem"].split("\n")[0]
    elif isinstance(metadata, dict):
        parts = [f"{k}={number(v)}" for k, v in metadata.items()]
        notes += " ".join(parts)
    size = "-" if entry["nbytes"] is None else in_bytes(entry["nbytes"])
    age = "-" if entry["saved"] is None else _age(entry["saved"])
    return [str(entry["step"]), age, size, number(entry["leaves"]), notes]


def _age(saved: float) -> str:
    seconds = max(0, int(datetime.datetime.now().timestamp() - saved))
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
