"""Commands for runs."""

import datetime
import os
from typing import Any

import eqx_ckpt

from .._format.screen import in_bytes
from .._retention import check_mode, ranked
from .._steps import Run
from ._output import number, printable, say, say_json, table


def ls(path: str, best: str, mode: Any, as_json: bool) -> int:
    check_mode(mode)
    run = Run(path)
    steps = run.steps()
    if not steps:
        raise eqx_ckpt.CheckpointNotFoundError(
            f"There is no step in {run.directory!r}. {run.explain()}".rstrip()
        )
    entries = [_entry(run, step) for step in steps]
    metrics = {entry["step"]: entry["metadata"] for entry in entries}
    first = next(iter(ranked(metrics, best, mode)), None) if best else None
    for entry in entries:
        entry["latest"] = entry["step"] == steps[-1]
        entry["best"] = entry["step"] == first
    if as_json:
        say_json({"run": run.directory, "steps": entries})
    else:
        for line in table(("step", "age", "size", "leaves", ""), map(_row, entries)):
            say(line)
    return 0


def _entry(run: Run, step: int) -> dict[str, Any]:
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
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def verify(path: str, as_json: bool) -> int:
    run = Run(path)
    steps = run.steps()
    paths = [os.fspath(run.path(step)) for step in steps] or [path]
    results: list[dict[str, Any]] = []
    for one in paths:
        problem = None
        try:
            eqx_ckpt.verify(one)
        except eqx_ckpt.CorruptCheckpointError as e:
            problem = str(e)
        results.append({"path": one, "ok": problem is None, "problem": problem})
        if not as_json:
            say(printable(f"{one}: ok") if problem is None else problem)
    if as_json:
        say_json({"checkpoints": results})
    return 0 if all(result["ok"] for result in results) else 1


def rm(path: str, steps: list[int]) -> int:
    run = Run(path)
    there = run.steps()
    missing = [step for step in steps if step not in there]
    if missing:
        raise run.missing(missing[0])
    manager = eqx_ckpt.CheckpointManager(path)
    for step in steps:
        manager.delete(step)
        say(f"deleted {os.fspath(run.path(step))}")
    return 0
