"""The steps of a run."""

import contextlib
import datetime
import os
from collections.abc import Sequence
from typing import Any

import eqx_ckpt

from .._format.display import in_bytes, table
from .._format.run_history import Fork, History
from .._inspecting.inspect_checkpoint import read_manifest, verify as is_intact
from .._steps.compare_histories import (
    begun_by,
    in_marks,
    is_same_step,
    Relation,
    relations,
    why_not_the_same,
)
from .._steps.retention import Mode
from .._steps.run_config import (
    as_json as json_of,
    config_changes,
    Configs,
    damaged_configs,
)
from .._steps.run_steps import as_step, best_of, check_places, Run
from .._steps.run_sweeps import garbage_collect
from .._storage.locate import is_web
from .command_sources import found_at
from .exit_status import DAMAGED, status_of
from .option_words import in_options
from .terminal import bar, NO_CHECKSUMS, number, say, say_json, say_problem, Styled


# What removes steps may run beside any command.
VANISHED = (eqx_ckpt.CheckpointNotFoundError, FileNotFoundError)


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def ls(
    path: str,
    best: str | None,
    mode: Mode,
    own: bool,
    mirror: str | None,
    as_json: bool,
) -> int:
    run = Run(path)
    places = [run] if mirror is None else [run, Run(mirror)]
    check_places(places, mirror)
    found, status = _entries(places)
    histories = {e["step"]: e["history"] for e in found if e["history"]}
    status = max(status, _add_changes(places, found))
    related = relations(histories)
    for entry in found:
        if history := entry["history"]:
            entry["history"] = _history(history, related[entry["step"]])
    if own:
        _add_own_bytes(run, found)
    newest = found[-1] if found else None
    first = None
    if best is not None:
        by_step = {entry["step"]: entry for entry in found}
        metadata = {step: entry["metadata"] for step, entry in by_step.items()}
        first = by_step[best_of(metadata, best, mode, run.directory)]
    for place in places:
        for unusable in place.unusable():
            entry = _described(unusable.step, unusable.path, [place])
            found.append(entry | {"problem": in_options(unusable.problem)})
            status = max(status, DAMAGED)
    for entry in found:
        entry["latest"] = entry is newest
        entry["best"] = entry is first
        if mirror is None:
            entry["places"] = None
    if as_json:
        say_json({"run": run.directory, "steps": found})
        return status
    rows = [_row(entry, own, run.directory) for entry in found]
    titles = ["step", "age", "size", *(["own"] if own else []), "leaves"]
    lines = iter(table([*titles, *(["where"] if mirror is not None else []), ""], rows))
    say(Styled(next(lines), "dim"))
    for line, entry in zip(lines, found, strict=True):
        color = "red" if entry["problem"] else "green" if entry["best"] else None
        say(Styled(line, color))
    return status


def _add_changes(places: Sequence[Run], found: list[dict[str, Any]]) -> int:
    """Add how the config differs from that of the step before; return the status."""
    configs = Configs([place.place for place in places])
    histories: dict[int, History | None] = {}
    status = 0
    for entry in found:
        try:
            configs.of(entry["history"])
            histories[entry["step"]] = entry["history"]
        except (eqx_ckpt.CheckpointError, OSError) as e:
            entry["problem"] = entry["problem"] or in_options(e)
            status = max(status, status_of(e))
    changed = config_changes(histories, configs)
    for entry in found:
        history = histories.get(entry["step"])
        if history is not None and history.config is not None:
            entry["config_changes"] = {
                name: [*map(json_of, values)]
                for name, values in changed.get(entry["step"], {}).items()
            }
    return status


def _entries(places: Sequence[Run]) -> tuple[list[dict[str, Any]], int]:
    """What there is to say of each step in some places, and the exit status."""
    listed = [(place, place.readable_or_not()) for place in places]
    found: list[dict[str, Any]] = []
    status = 0
    steps = sorted({step for _, of_place in listed for step in of_place})
    for step in steps or places[0].at_least_one():
        having = [place for place, of_place in listed if step in of_place]
        entry, problem = entry_of(having, step)
        # What has vanished here meanwhile may still be there.
        while isinstance(problem, VANISHED) and (having := having[1:]):
            entry, problem = entry_of(having, step)
        if isinstance(problem, VANISHED):
            continue
        if problem is not None:
            entry["problem"] = in_options(problem)
            status = max(status, status_of(problem))
        elif len(having) > 1 and (difference := _difference(having, step)):
            entry["problem"], status = difference, max(status, DAMAGED)
        found.append(entry)
    return found, status


def _difference(places: Sequence[Run], step: int) -> str:
    """What is wrong with the step of a number in two places, or `''`."""
    try:
        here, there = (read_manifest(place.path(step)) for place in places)
    except VANISHED:
        return ""
    except (eqx_ckpt.CheckpointError, OSError) as e:
        return in_options(e)
    if is_same_step(here, there):
        return ""
    return why_not_the_same(step, places[1].directory, places[0].directory)


def _add_own_bytes(run: Run, found: list[dict[str, Any]]) -> None:
    """Add what deleting each step would free, as far as that can be seen."""
    sizes: dict[int, int] = {}
    # Of a step in a store that cannot be read, nobody knows what it refers to.
    local = [entry for entry in found if run.directory in entry["places"]]
    with contextlib.suppress(eqx_ckpt.CheckpointError):
        sizes = run.stored.own_bytes([entry["step"] for entry in local])
    for entry in local:
        if entry["problem"] is None:
            entry["own_nbytes"] = sizes.get(entry["step"])


def entry_of(
    places: Sequence[Run], step: int
) -> tuple[dict[str, Any], Exception | None]:
    """What there is to say of a step in the first of its places, and why not more."""
    run = places[0]
    path = os.fspath(run.path(step))
    entry = _described(step, path, places)
    try:
        if os.path.exists(path):
            entry["saved"] = os.stat(f"{path}/zarr.json").st_mtime
        manifest = read_manifest(run.path(step))
    except (eqx_ckpt.CheckpointError, OSError) as e:
        return entry, e
    entry |= {"nbytes": manifest.nbytes, "leaves": len(manifest.leaves)}
    return entry | {"metadata": manifest.metadata, "history": manifest.history}, None


def _described(step: int, path: str, places: Sequence[Run]) -> dict[str, Any]:
    """An entry of which nothing else is known."""
    unknown = ("saved", "nbytes", "own_nbytes", "leaves", "metadata", "history")
    where = [place.directory for place in places]
    entry = {"step": step, "path": path, "places": where}
    return entry | dict.fromkeys((*unknown, "config_changes", "problem"))


def _history(history: History, relation: Relation) -> dict[str, Any]:
    session, fork = history.sessions[-1], begun_by(history)
    return {
        "run": history.run,
        "saved_as": history.step,
        "session": session.id,
        "restored": session.step,
        "relation": relation.kind,
        "common": relation.common,
        "forked": None if fork is None else {"run": fork.run, "step": fork.step},
    }


def _row(entry: dict[str, Any], own: bool, run: str) -> list[str]:
    marks = [mark for mark in ("latest", "best") if entry[mark]]
    if history := entry["history"]:
        relation = Relation(history["relation"], history["common"])
        fork = history["forked"] and Fork(**history["forked"], digest="")
        marks += in_marks(entry["step"], history["saved_as"], relation, fork)
    changed = [*(entry["config_changes"] or {}).items()]
    marks += [f"{name}: {a} → {b}" for name, (a, b) in changed[:3]]
    marks += ["..."] if len(changed) > 3 else []
    sizes = [entry["nbytes"], entry["own_nbytes"]] if own else [entry["nbytes"]]
    shown = ["-" if size is None else in_bytes(size) for size in sizes]
    where = [] if entry["places"] is None else [_where(entry["places"], run)]
    about = [*shown, number(entry["leaves"]), *where, summary(marks, entry)]
    return [str(entry["step"]), age_of(entry), *about]


def summary(marks: Sequence[str], entry: dict[str, Any]) -> str:
    """What is unusual of a step, and its metadata or what is wrong with it."""
    notes = f"[{', '.join(marks)}] " if marks else ""
    metadata = entry["metadata"]
    if entry["problem"]:
        return notes + entry["problem"].split("\n")[0]
    if isinstance(metadata, dict):
        notes += " ".join(f"{k}={number(v)}" for k, v in metadata.items())
    return notes


def _where(places: list[str], run: str) -> str:
    if len(places) > 1:
        return "both"
    return "run" if places == [run] else "mirror"


def age_of(entry: dict[str, Any]) -> str:
    """How long ago a step was saved, in words."""
    if entry["saved"] is None:
        return "-"
    seconds = max(0, int(datetime.datetime.now().timestamp() - entry["saved"]))
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def verify(path: str, digest: str | None, as_json: bool) -> int:
    run = None if is_web(path) else Run(path)
    steps = [] if run is None else [*map(run.path, run.readable_or_not())]
    paths = [os.fspath(step) for step in steps] or [path]
    if steps and digest is not None:
        raise eqx_ckpt.CheckpointError(
            f"{path!r} is a run, and `--digest` is of one checkpoint. Pass one of its "
            f"steps: {paths[-1]!r}."
        )
    results: list[dict[str, Any]] = []
    status = 0
    with bar() as progress:
        for one in paths:
            result = {"path": one, "ok": True, "problem": None}
            try:
                found = found_at(one)
                if not is_intact(found, digest=digest, progress=progress(one)):
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
    others: dict[str, str] = {}
    if steps and run is not None:
        others = {one.path: one.problem for one in run.unusable()}
        others |= damaged_configs(run)
    for other, why in others.items():
        status = max(status, DAMAGED)
        results.append({"path": other, "ok": False, "problem": in_options(why)})
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
    if (problem := run.explain()) and not run.stored.named():
        raise eqx_ckpt.CheckpointNotFoundError(f"{path!r} is not a run. {problem}")
    found = garbage_collect(path, dry_run=dry_run)
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
