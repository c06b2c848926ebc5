"""What each step of a run takes for itself."""

from .._types import PathLike
from .run_steps import Run


def own_bytes(directory: PathLike) -> dict[int, int]:
    """The bytes that each step of a run has for itself: what its deletion would free.

    Steps of `CheckpointManager(incremental=True)` share chunks: what two of them have
    belongs to neither.

    **Arguments:**

    - `directory`: the directory or URL of the run.

    **Returns:**

    The bytes of each step. In a directory, those of the files that have no other link,
    which takes a call of the system for each file. In a store, those of the data in the
    chunks that no other step has, as the manifests say; there, the chunks go when a
    manager has seen for some time that nothing refers to them.

    **Raises:**

    - [`eqx_ckpt.CorruptCheckpointError`][]: in a store, a manifest is damaged.
    - [`eqx_ckpt.CheckpointError`][]: the newest checkpoint is misnamed.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        base = jnp.zeros(1000)
        with eqx_ckpt.CheckpointManager("runs/a", incremental=True) as manager:
            for step in (1, 2):
                manager.save(step, {"base": base, "head": jnp.full(3, step)})
        own = eqx_ckpt.inspect.own_bytes("runs/a")
        assert own[1] < 4000
        ```
    """
    run = Run(directory)
    steps = run.readable_or_not()
    run.check_unusable(steps)
    return run.stored.own_bytes(steps)
