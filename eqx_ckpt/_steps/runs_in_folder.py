"""The runs in a folder, such as those of a sweep."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._storage.calls.store_path import StorePath
from .._storage.calls.threads import at_once
from .._storage.locate import locate
from .._types import check_text, PathLike
from .retention import check_mode, Mode
from .run_steps import best_of, Run


logger = logging.getLogger("eqx_ckpt")


class RunInFolder(NamedTuple):
    """A run that is directly in a folder, its name there, and its steps."""

    name: str
    run: Run
    steps: list[int]


def runs_in(folder: PathLike) -> list[RunInFolder]:
    """The runs directly in a folder that have a step, by name.

    A recording is none, although its states are steps.
    """
    place = locate(folder)
    if place.explain_run():
        return []
    above = folder if isinstance(folder, StorePath) else None
    runs = {
        name: Run(f"{place.url()}/{name}" if above is None else above / name)
        for name in place.folders()
    }
    steps = at_once(lambda name: _steps(runs[name]), runs)
    return [RunInFolder(name, runs[name], steps[name]) for name in runs if steps[name]]


def _steps(run: Run) -> list[int]:
    """The steps of what may be a run; say so if it may be one, and none can be used."""
    try:
        steps = run.readable_or_not()
    except PermissionError as e:  # Such as of `lost+found`.
        logger.warning("%r is passed over: %s", run.directory, e)
        return []
    for entry in [] if steps else run.unusable():
        if entry.is_checkpoint:
            logger.warning("%s", entry.problem)
    return steps


def best_step(directory: PathLike, metric: str, mode: Mode = "min") -> PathLike:
    """The path of the step with the best value of a metric, among several runs.

    **Arguments:**

    - `directory`: a folder of runs, such as those of a sweep; or one run.
    - `metric`, `mode`: as in [`eqx_ckpt.CheckpointManager.best`][].

    **Returns:**

    The path or URL of the step; among equal ones, that of the largest number, and of
    these, in the run whose name comes first.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is neither a step nor a run, or no
        step has the metric.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the manifest of a step is damaged.
    - [`eqx_ckpt.CheckpointError`][]: the newest checkpoint of a run is misnamed.

    !!! example

        ```python
        import eqx_ckpt

        for rate in (0.1, 0.2):
            with eqx_ckpt.CheckpointManager(f"runs/{rate}") as manager:
                manager.save(1, {"model": {"w": rate}}, metadata={"loss": rate})
        best = eqx_ckpt.load(eqx_ckpt.inspect.best_step("runs", "loss"), "model")
        assert best == {"w": 0.1}
        ```
    """
    check_text("metric", metric)
    check_mode(mode)
    run = Run(directory)
    if steps := run.readable_or_not():
        runs = [RunInFolder("", run, steps)]
    else:
        runs = runs_in(directory)
    if not runs:
        run.at_least_one()
    for found in runs:
        found.run.check_unusable(found.steps)
    metadata = {
        (place, step): found.run.metadata(step)
        for place, found in enumerate(runs)
        for step in found.steps
    }
    place, step = best_of_runs(metadata, metric, mode, run.directory)
    return runs[place].run.path(step)


def best_of_runs(
    metadata: Mapping[tuple[int, int], Any], metric: str, mode: Mode, where: str
) -> tuple[int, int]:
    """The best of some steps, each with the place of its run; see `best_step`."""
    # Of equal ones, `best_of` returns the one with the largest index.
    every = sorted(metadata, key=lambda at: (at[1], -at[0]))
    steps = {i: metadata[at] for i, at in enumerate(every)}
    return every[best_of(steps, metric, mode, where)]
