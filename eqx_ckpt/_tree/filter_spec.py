"""Equinox's `filter_spec` protocol: `spec(f, leaf)`, one leaf at a time.

Each leaf has a file of its own. What a spec writes to it is kept as bytes; a leaf that
a spec hands on to the default spec, Equinox's or ours, becomes an array of its own.
"""

import io
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._format.leaves import Skipped, Written
from .._types import KeyPath, Spec


class LeafWriter(io.BytesIO):
    """The file `f` of one leaf that is being saved; `f.name` and `f.path` say which."""

    def __init__(self, name: str, path: KeyPath) -> None:
        super().__init__()
        self.name = name
        self.path = path
        self.saved: list[Any] = []


class LeafReader(io.BufferedReader):
    """The file `f` of one leaf that is being restored.

    It holds what Equinox would have written: the bytes of a custom `filter_spec`, or
    the leaf as an `.npy` file. Nothing is read from the checkpoint before `f` is.
    """

    def __init__(
        self,
        name: str,
        path: KeyPath,
        content: Callable[[], bytes],
        restore: Callable[[Any], Any],
    ) -> None:
        super().__init__(_Lazy(content))
        self.leaf_name = name
        self.path = path
        self.restore = restore

    @property
    def name(self) -> str:
        return self.leaf_name


class _Lazy(io.RawIOBase):
    def __init__(self, content: Callable[[], bytes]) -> None:
        self._content = content
        self._file: io.BytesIO | None = None

    def _open(self) -> io.BytesIO:
        if self._file is None:
            self._file = io.BytesIO(self._content())
        return self._file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        return self._open().readinto(buffer)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._open().seek(offset, whence)

    def tell(self) -> int:
        return 0 if self._file is None else self._file.tell()


def default_serialise_filter_spec(f: Any, x: Any) -> None:
    """Save a leaf as this package saves it, or do nothing if it is no array or number.

    Also works as the `filter_spec` of `equinox.tree_serialise_leaves`.

    **Arguments:**

    - `f`: the file of the leaf, as it is passed to a `filter_spec`. `f.name` is the
        leaf's name and `f.path` its JAX key path.
    - `x`: the leaf to save. It may be another one than the `filter_spec` was called
        with: what is passed here is what is saved.

    **Returns:**

    Nothing.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        def half_precision_encoder(f, x):
            if f.name.startswith("encoder/"):
                x = x.astype(jnp.bfloat16)
            eqx_ckpt.default_serialise_filter_spec(f, x)

        tree = {"encoder": jnp.ones(3), "head": jnp.ones(3)}
        eqx_ckpt.tree_serialise_leaves("half", tree, half_precision_encoder)
        ```
    """
    if isinstance(f, LeafWriter):
        f.saved.append(x)
    else:
        eqx.default_serialise_filter_spec(f, x)


def default_deserialise_filter_spec(f: Any, x: Any) -> Any:
    """Restore a leaf as this package restores it, or return `x` if it was not saved.

    Also works as the `filter_spec` of `equinox.tree_deserialise_leaves`.

    **Arguments:**

    - `f`: the file of the leaf, as it is passed to a `filter_spec`. `f.name` is the
        leaf's name and `f.path` its JAX key path.
    - `x`: what the leaf is like: its shape, dtype and sharding are checked and used.

    **Returns:**

    The leaf from the checkpoint.

    **Raises:**

    - [`eqx_ckpt.LeafMismatchError`][]: the leaf is missing, or differs from `x`.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        def all_but_the_head(f, x):
            if f.name.startswith("head"):
                return x
            return eqx_ckpt.default_deserialise_filter_spec(f, x)

        tree = {"encoder": jnp.ones(3), "head": jnp.ones(3)}
        eqx_ckpt.tree_serialise_leaves("all", tree)
        eqx_ckpt.tree_deserialise_leaves("all", tree, all_but_the_head)
        ```
    """
    if isinstance(f, LeafReader):
        return f.restore(x)
    return eqx.default_deserialise_filter_spec(f, x)


def saved_by(spec: Spec, f: LeafWriter, leaf: Any) -> Any:
    """What a custom `filter_spec` saves of a leaf.

    Either the leaf (or another) that it handed on to a default spec, or what it wrote,
    or that it skipped the leaf.
    """
    if isinstance(leaf, jax.Array | np.ndarray) and _hands_on(spec, f, leaf):
        return leaf
    with _naming(f.name):
        spec(f, leaf)
    written = f.getvalue()
    if len(f.saved) > 1 or (f.saved and written):
        raise ValueError(
            f"The `filter_spec` saved leaf {f.name!r} more than once: call the default "
            "spec once, or write bytes to `f`, but not both."
        )
    if f.saved:
        return f.saved[0]
    if written and written == _equinox_bytes(leaf):
        return leaf
    return Written(written) if written else Skipped(leaf)


def restored_by(spec: Spec, f: LeafReader, like: Any) -> Any:
    """What a custom `filter_spec` makes of a leaf."""
    with _naming(f.name):
        return spec(f, like)


@contextmanager
def _naming(name: str) -> Generator[None, None, None]:
    """Adds the name of the leaf to whatever a user's `filter_spec` raises."""
    try:
        yield
    except Exception as e:
        e.add_note(f"This was raised by the `filter_spec` at leaf {name!r}.")
        raise


def _equinox_bytes(leaf: Any) -> bytes | None:
    """What Equinox's default spec writes for a Python or NumPy scalar."""
    if isinstance(leaf, jax.Array | np.ndarray) or not eqx.is_array_like(leaf):
        return None
    f = io.BytesIO()
    eqx.default_serialise_filter_spec(f, leaf)
    return f.getvalue()


def _hands_on(spec: Spec, f: LeafWriter, leaf: Any) -> bool:
    """Whether all that `spec` does to save an array is to call a default spec with it.

    Equinox's default calls `np.save`, which would gather the array on the host. So the
    spec is tried with a stand-in that NumPy hands that call to. A spec that does
    anything else with the leaf is then run on the real one.
    """
    trial = LeafWriter(f.name, f.path)
    stand_in = _StandIn(leaf, trial)
    try:
        spec(trial, stand_in)
    except Exception:
        return False
    return len(trial.saved) == 1 and trial.saved[0] is stand_in and not trial.getvalue()


class _StandIn:
    """Looks like an array to `isinstance` and attribute access, but is not one."""

    def __init__(self, leaf: Any, file: LeafWriter) -> None:
        self._leaf = leaf
        self._file = file

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._leaf)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._leaf, name)

    def __array_function__(
        self, function: Any, types: Any, args: Any, kwargs: Any
    ) -> None:
        if function is not np.save or kwargs or args[0] is not self._file:
            raise NotImplementedError
        self._file.saved.append(args[1])
