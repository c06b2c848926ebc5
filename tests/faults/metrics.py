"""A run whose older steps are removed, with their metrics; in a child of the zygote."""

from collections.abc import Callable

import eqx_ckpt

from . import shim


def loss(step: int) -> dict[str, float]:
    return {"loss": 1 / step}


def save(
    directory: str, first: int, last: int, note: Callable[[str], object] = len
) -> None:
    """Save some steps, of which the last one is kept; note each that was saved."""
    keep = eqx_ckpt.keep_last(1)
    with eqx_ckpt.CheckpointManager(directory, keep=keep) as manager:
        if manager.latest() is not None:
            manager.restore({"w": 0})
        for step in range(first, last + 1):
            manager.save(step, {"w": step}, metadata=loss(step)).result()
            note(str(step))


def save_and_note(directory: str, first: int, last: int) -> None:
    save(directory, first, last, shim.note)


def look(directory: str) -> tuple[list[int], dict[int, dict[str, float]]]:
    """The steps, and the metrics, before and after another save."""
    run = f"{directory}/run"
    before = eqx_ckpt.inspect.metrics(run)
    save(run, 9, 9)
    found = eqx_ckpt.inspect.metrics(run)
    assert found == {**before, 9: loss(9)}
    return eqx_ckpt.CheckpointManager(run).steps(), before
