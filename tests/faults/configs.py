"""A run whose sessions have configs; in a child of the zygote."""

from typing import Any

import eqx_ckpt

from . import shim


def config(session: int) -> dict[str, Any]:
    return {"optim": {"lr": 10.0**-session}, "seed": 0}


def save(directory: str, session: int) -> None:
    """Go on with a step in a session of its own, which has a config of its own."""
    with eqx_ckpt.CheckpointManager(directory, config=config(session)) as manager:
        if manager.latest() is not None:
            manager.restore({"w": 0})
        manager.save(session, {"w": session}).result()
        shim.note(str(session))


def look(directory: str) -> dict[int, Any]:
    """The config of each step, after another save in a session of its own."""
    run = f"{directory}/run"
    save(run, 9)
    manager = eqx_ckpt.CheckpointManager(run)
    return {step: manager.read_config(step) for step in manager.steps()}
