"""The steps of a run."""

import datetime
import os
from typing import Any

import eqx_ckpt

from .._format.screen import in_bytes
from .._retention import Mode, ranked
from .._steps import Run
from ._output import number, printable, say, say_json, styled, table


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def ls(path: str, best: str, mode: Mode, as_json: bool) -> int:
    run = Run(path)
    steps = steps_of(run)
    found = [entry for step in steps if (entry := _entry(run, step)) is not None]
    metrics = {entry["step"]: entry["metadata"] for entry in found}
    first = next(iter(ranked(metrics, best, mode)), None) if best else None
    for entry in found:
        entry["latest"] = entry is found[-1]
        entry["best"] = entry["step"] == first
    if as_json:
        say_json({"run": run.directory, "steps": found})
        return 0
    lines = iter(table(("step", "age", "size", "leaves", ""), map(_row, found)))
    say(styled(next(lines), "dim"))
    for line, entry in zip(lines, found, strict=True):
        color = "red" if entry["problem"] else "green" if entry["best"] else None
        say(styled(line, color) if color else line)
    return 0


def steps_of(run: Run) -> list[int]:
    """The steps of a run; raise if there is none."""
    steps = run.readable_or_not()
    if not steps:
        raise eqx_ckpt.CheckpointNotFoundError(
            f"There is no step in {run.directory!r}. {run.explain()}".rstrip()
        )
    return steps


def _entry(run: Run, step: int) -> dict[str, Any] | None:
    """What there is to say of a step; nothing if it has vanished meanwhile."""
    path = os.fspath(run.path(step))
    entry: dict[str, Any] = {
        "step": step,
        "path": path,
        "saved": None,
        "nbytes": None,
        "leaves": None,
        "metadata": None,
        "problem": None,
    }
    try:
        if os.path.exists(path):
            entry["saved"] = os.stat(f"{path}/zarr.json").st_mtime
        manifest = eqx_ckpt.read_manifest(run.path(step))
        entry |= {"nbytes": manifest.nbytes, "leaves": len(manifest.leaves)}
        entry["metadata"] = manifest.metadata
    except (eqx_ckpt.CheckpointNotFoundError, FileNotFoundError):
        return None
    except (eqx_ckpt.CheckpointError, OSError) as e:
        entry["problem"] = str(e)
    return entry


def _row(entry: dict[str, Any]) -> list[str]:
    marks = [mark for mark in ("latest", "best") if entry[mark]]
    notes = f"[{', '.join(marks)}] " if marks else ""
    metadata = entry["metadata"]
    if entry["problem"]:
        notes += printable(entry["problem"].splitlines()[0])
    elif isinstance(metadata, dict):
        parts = [f"{k}={number(v)}" for k, v in metadata.items()]
        notes += printable(" ".join(parts))
    size = "-" if entry["nbytes"] is None else in_bytes(entry["nbytes"])
    age = "-" if entry["saved"] is None else _age(entry["saved"])
    return [str(entry["step"]), age, size, number(entry["leaves"]), notes]


def _age(saved: float) -> str:
    seconds = max(0, int(datetime.datetime.now().timestamp() - saved))
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
