"""Commands for runs: what is damaged, and what is to go."""

import os
from typing import Any

import eqx_ckpt

from .._format.screen import in_bytes
from .._steps import as_step, Run
from ._guard import DAMAGED, status_of
from ._output import NO_CHECKSUMS, say, say_json, say_problem, Styled, table
from ._progress import bar
from ._sources import found_at
from ._words import in_options


def verify(path: str, as_json: bool) -> int:
    run = Run(path)
    steps = run.readable_or_not()
    results: list[dict[str, Any]] = []
    status = 0
    with bar() as progress:
        for one in [os.fspath(run.path(step)) for step in steps] or [path]:
            result = {"path": one, "ok": True, "problem": None}
            try:
                if not eqx_ckpt.verify(found_at(one), progress=progress(one)):
                    result |= {"ok": None, "problem": NO_CHECKSUMS}
            except (eqx_ckpt.CheckpointError, OSError) as e:
                # Of a run, the other steps are verified all the same.
                if not steps and status_of(e) != DAMAGED:
                    raise
                if isinstance(e, eqx_ckpt.CheckpointNotFoundError):
                    continue
                status = max(status, status_of(e))
                result |= {"ok": False, "problem": in_options(e)}
            results.append(result)
            if not as_json:
                _say_result(result)
    for stranger in run.strangers() if steps else ():
        status = DAMAGED
        problem = in_options(stranger.problem)
        results.append({"path": stranger.path, "ok": False, "problem": problem})
        if not as_json:
            _say_result(results[-1])
    if as_json:
        say_json({"checkpoints": results})
    return status


def _say_result(result: dict[str, Any]) -> None:
    if result["ok"]:
        say(Styled("ok", "green"), f"  {result['path']}")
    elif result["ok"] is None:
        say(f"read  {result['path']}: {result['problem']}")
    else:
        say_problem(result["problem"])


def rm(path: str, steps: list[int]) -> int:
    run = Run(path)
    wanted = dict.fromkeys(map(as_step, steps))
    for step in wanted:
        run.check(step)
    manager = eqx_ckpt.CheckpointManager(path)
    for step in wanted:
        manager.delete(step)
        say(f"deleted {os.fspath(run.path(step))}")
    return 0


def gc(path: str, dry_run: bool, as_json: bool) -> int:
    run = Run(path)
    if "://" not in run.directory and not os.path.isdir(run.directory):
        raise eqx_ckpt.CheckpointNotFoundError(f"{path!r} is not a directory.")
    if (problem := run.explain()) and not run.named():
        raise eqx_ckpt.CheckpointNotFoundError(f"{path!r} is not a run. {problem}")
    found = eqx_ckpt.orphans(path) if dry_run else eqx_ckpt.sweep(path)
    known = [nbytes for nbytes in found.values() if nbytes is not None]
    total = sum(known) if len(known) == len(found) else None
    if as_json:
        orphans = [{"path": one, "nbytes": nbytes} for one, nbytes in found.items()]
        say_json(
            {"run": path, "removed": not dry_run, "nbytes": total}
            | {"orphans": orphans}
        )
        return 0
    rows = [
        ["-" if nbytes is None else in_bytes(nbytes), one]
        for one, nbytes in found.items()
    ]
    for line in table(["size", "path"], rows) if rows else ():
        say(line)
    size = "" if total is None else f", {in_bytes(total)}"
    verb = "would be removed" if dry_run else "removed"
    say(f"{len(found)} {'attempt' if len(found) == 1 else 'attempts'} {verb}{size}")
    return 0
