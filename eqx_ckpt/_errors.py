"""The errors of this package, and how it warns.

```
CheckpointError
├── CheckpointNotFoundError  (also a FileNotFoundError)
├── CheckpointExistsError    (also a FileExistsError)
├── CorruptCheckpointError
├── LeafNameError            (also a ValueError)
└── LeafMismatchError        (also a ValueError)
```

Failures of the operating system (no space, no permission) are Python's own: `OSError`
with its `errno`.
"""

import contextlib
import inspect
import os
import warnings
from collections.abc import Generator


_PACKAGE = os.path.join(os.path.dirname(__file__), "")


class CheckpointError(Exception):
    """The base class; itself raised where no subclass fits.

    !!! example

        ```python
        import eqx_ckpt

        try:
            eqx_ckpt.tree_serialise_leaves("ckpt", {"step": 1}, metadata={"a", "b"})
        except eqx_ckpt.CheckpointError as e:
            assert "`metadata` cannot be saved exactly" in str(e)
        ```
    """


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this path.

    !!! example

        ```python
        import eqx_ckpt

        try:
            state = eqx_ckpt.tree_deserialise_leaves("runs/a/000100", {"step": 0})
        except eqx_ckpt.CheckpointNotFoundError:
            state = {"step": 0}  # Begin anew.
        ```
    """


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Something exists at this path already; it was not changed.

    !!! example

        ```python
        import eqx_ckpt

        eqx_ckpt.tree_serialise_leaves("ckpt", {"step": 1})
        try:
            eqx_ckpt.tree_serialise_leaves("ckpt", {"step": 2})
        except eqx_ckpt.CheckpointExistsError:
            eqx_ckpt.tree_serialise_leaves("ckpt", {"step": 2}, overwrite=True)
        ```
    """


class CorruptCheckpointError(CheckpointError):
    """The stored bytes are not the bytes that were saved.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3)})
        with open("ckpt/w/c.0", "r+b") as f:
            f.write(b"x")  # As a disk may do.
        try:
            eqx_ckpt.tree_deserialise_leaves("ckpt", {"w": jnp.zeros(3)})
        except eqx_ckpt.CorruptCheckpointError as e:
            assert "'w'" in str(e)  # Restore another checkpoint.
        ```
    """


class LeafNameError(CheckpointError, ValueError):
    """Leaves of a PyTree cannot be given distinct names that are safe on disk.

    !!! example

        ```python
        import eqx_ckpt

        try:
            eqx_ckpt.tree_serialise_leaves("ckpt", {0.5: 1.0})
        except eqx_ckpt.LeafNameError:
            eqx_ckpt.tree_serialise_leaves("ckpt", {"0.5": 1.0})
        ```
    """


class LeafMismatchError(CheckpointError, ValueError):
    """The checkpoint does not match `like`, or an argument does not match a PyTree.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3)})
        like = {"w": jnp.zeros(4), "b": jnp.zeros(3)}
        try:
            eqx_ckpt.tree_deserialise_leaves("ckpt", like)
        except eqx_ckpt.LeafMismatchError as e:
            print(e)  # Both differences, and what may be done.
        ```
    """


for _error in (CheckpointError, *CheckpointError.__subclasses__()):
    _error.__module__ = "eqx_ckpt"  # As people import it, and as tracebacks show it.


@contextlib.contextmanager
def besides(error: BaseException | None, what: str) -> Generator[None]:
    """At the end of a `with` block: raise what fails, or add it to the block's error.

    **Arguments:**

    - `error`: what the block has raised.
    - `what`: what may fail at its end.
    """
    try:
        yield
    except Exception as e:
        if error is None:
            raise
        if error is not e:
            error.add_note(f"Besides, {what} failed: {e!r}")


def warn(text: str) -> None:
    """Warn, at the line outside of this package that has called it."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
