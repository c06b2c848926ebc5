"""The metrics of a run: of the steps that are there, and of those that were removed."""

import contextlib
import json
import logging
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .._errors import CheckpointError
from .._format.run_history import (
    History,
    history_from_json,
    history_to_json,
    last_sessions,
)
from .._format.user_metadata import pack, unpack
from .._storage.calls.threads import at_once
from .._storage.interface.committed_manifest import read_metadata_and_history
from .._storage.interface.place import log_name, log_number, METRICS
from .._types import is_real, PathLike
from .compare_histories import Line, Sessions
from .retention import numbers_in
from .run_steps import Run


logger = logging.getLogger("eqx_ckpt")


# So many metrics of a step are kept: of more, nobody would look at them.
MOST_METRICS = 200


# So many logs become one.
_MOST_LOGS = 64


class _Removed(NamedTuple):
    """What is kept of a step: its metrics, and its history, if it has one.

    That names the session that saved it, and the one before, so that all together tell
    which sessions came from one another.
    """

    step: int
    history: History | None
    metrics: dict[str, Any]

    @property
    def session(self) -> str | None:
        return self.history and self.history.sessions[-1].id


def keep_metrics(run: Run, steps: Collection[int]) -> None:
    """Write the metrics of steps that are about to be removed to a log of the run.

    A log is never changed: what a later one says of the same save holds. When there are
    many, they become one, which is there before they are deleted. The steps are removed
    even if this fails, which may be because the disk is full.
    """
    try:
        names = run.stored.beside(METRICS) if steps else []
        found = [one for step in steps if (one := _of_step(run, step)) is not None]
        # One without metrics may have been saved before with some.
        if found and (names or any(one.metrics for one in found)):
            number = max(map(log_number, names), default=0) + 1
            _merge(run, [*names, _write(run, found, number)])
    except (OSError, CheckpointError) as e:
        logger.warning("The metrics of removed steps are lost: %s", e)


def carry_metrics(runs: Sequence[Run], history: History, new: Run, id: str) -> None:
    """Write the metrics of the steps that have led to one to a log of a new run.

    The run of that step has several places. `id` is that of the new one.
    """
    try:
        every: list[_Removed] = []
        for run in reversed(runs):
            every += _in_order(_read(run, run.stored.beside(METRICS)))
            steps = [step for step in run.readable_or_not() if step < history.step]
            there = at_once(lambda step, run=run: _of_step(run, step), steps)
            every += [one for one in there.values() if one is not None]
        line = Line(Sessions([history, *_histories(every)]), history)
        found = {one.step: one for one in every if _is_on(line, one)}
        found.pop(history.step, None)
        if any(one.metrics for one in found.values()):
            _write(new, [_in_run(one, id) for one in found.values()], 1)
    except (OSError, CheckpointError) as e:
        logger.warning("The metrics of earlier steps were not copied: %s", e)


def _histories(every: Iterable[_Removed]) -> list[History]:
    return [one.history for one in every if one.history is not None]


def _is_on(line: Line, one: _Removed) -> bool:
    return one.history is not None and line.has_led(one.history)


def _in_run(one: _Removed, id: str) -> _Removed:
    return one._replace(history=one.history and replace(one.history, run=id))


def _of_step(run: Run, step: int) -> _Removed | None:
    try:
        metadata, history = read_metadata_and_history(run.location(step))
    except CheckpointError:  # Damaged, or removed by another process.
        return None
    metrics = dict([*numbers_in(metadata).items()][:MOST_METRICS])
    if history is not None:
        history = replace(last_sessions(history, 2), step=step, forked=None)
    return _Removed(step, history, metrics)


def _write(run: Run, removed: Collection[_Removed], number: int) -> str:
    sessions = {one.session: one.history for one in removed if one.history is not None}
    found = {
        "sessions": [*map(history_to_json, sessions.values())],
        "removed": [
            {"step": one.step, "session": one.session, "metrics": one.metrics}
            for one in removed
        ],
    }
    text = json.dumps(pack(found), separators=(",", ":"))
    name = log_name(number, secrets.token_hex(8))
    run.stored.write_beside(name, text.encode())
    return name


def _merge(run: Run, names: Collection[str]) -> None:
    if len(names) < _MOST_LOGS:
        return
    logs = _read(run, names)
    # Another process that has deleted some has merged all of them.
    if {*names} <= {*run.stored.beside(METRICS)}:
        # What was written meanwhile has a higher number.
        _write(run, _in_order(logs), max(map(log_number, names)))
        run.stored.delete_beside([*logs])


def _in_order(logs: Mapping[str, list[_Removed]]) -> list[_Removed]:
    """What is in logs, the oldest first; each save of a step once."""
    found: dict[tuple[int, str | None], _Removed] = {}
    for name in sorted(logs):
        for one in logs[name]:
            found.pop((one.step, one.session), None)
            found[one.step, one.session] = one
    return [*found.values()]


def _read(run: Run, names: Collection[str]) -> dict[str, list[_Removed]]:
    """What is in logs, by name; one that is malformed, or deleted by now, is left out.

    A process may have died while it wrote one, before it removed anything.
    """
    found: dict[str, list[_Removed]] = {}

    def read(name: str) -> bytes | None:
        with contextlib.suppress(OSError, CheckpointError):
            return run.stored.read_beside(name)
        return None

    for name, data in at_once(read, names).items():
        try:
            found[name] = _parsed(unpack(json.loads(data or b"")))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            continue
    return found


def _parsed(log: Any) -> list[_Removed]:
    histories = [history_from_json(value) for value in log["sessions"]]
    of_session = {history.sessions[-1].id: history for history in histories}

    def parsed(step: Any, session: Any, metrics: Any) -> _Removed:
        history = None if session is None else of_session[session]
        is_number = type(step) is int
        if not (is_number and all(map(is_real, metrics.values()))):
            raise ValueError("it is malformed")
        return _Removed(step, history and replace(history, step=step), metrics)

    return [parsed(**one) for one in log["removed"]]


def metrics(directory: PathLike) -> dict[int, dict[str, Any]]:
    """The metrics of a run, step by step, also of steps that were removed.

    **Arguments:**

    - `directory`: the directory or URL of a run.

    **Returns:**

    For each step, in order, the numbers in its `metadata`; nested ones as `eval/loss`.
    Of the steps that `keep` or `delete` has removed, those are there that have led to
    the newest step, with their first 200 numbers. What is damaged is left out.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no step.
    - [`eqx_ckpt.CheckpointError`][]: the newest checkpoint is misnamed.

    !!! example

        ```python
        import eqx_ckpt

        keep = eqx_ckpt.keep_last(1)
        with eqx_ckpt.CheckpointManager("runs/a", keep=keep) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"w": 0.5}, metadata={"loss": 1 / step})
        assert manager.steps() == [3]
        found = eqx_ckpt.inspect.metrics("runs/a")
        assert found == {1: {"loss": 1.0}, 2: {"loss": 0.5}, 3: {"loss": 1 / 3}}
        ```
    """
    run = Run(directory)
    run.at_least_one()
    return metrics_of(run)


def metrics_of(run: Run) -> dict[int, dict[str, Any]]:
    """As `metrics`; without what is damaged, and empty if there is no step."""
    found = _removed(run)
    for step in run.readable_or_not():
        with contextlib.suppress(CheckpointError, OSError):
            found[step] = numbers_in(run.metadata(step))
    return {step: found[step] for step in sorted(found)}


def _removed(run: Run) -> dict[int, dict[str, Any]]:
    """The metrics of removed steps that have led to the newest one, by step."""
    newest = run.newest_history()
    names = run.stored.beside(METRICS)
    logs = _read(run, names)
    if len(logs) < len(names):
        # If one was merged with others meanwhile, it is in a new one.
        logs = _read(run, run.stored.beside(METRICS))
    removed = _in_order(logs)
    if newest is not None and removed:
        line = _line_to(newest, removed, run)
        removed = [one for one in removed if _is_on(line, one)]
    found = {one.step: one.metrics for one in removed}
    return {step: metrics for step, metrics in found.items() if metrics}


def _line_to(newest: History, removed: Iterable[_Removed], run: Run) -> Line:
    """The sessions that have led to a step of a run; all that can be known."""
    sessions = Sessions([newest, *_histories(removed)])
    line = Line(sessions, newest)
    if line.is_known:
        return line
    there = at_once(run.readable_history, run.readable_or_not())
    for history in there.values():
        if history is not None:
            sessions.add(history)
    return Line(sessions, newest)
