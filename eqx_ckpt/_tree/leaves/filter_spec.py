"""Equinox's `filter_spec` protocol: `spec(f, leaf)`, one leaf at a time.

Each leaf has its own file. What a spec writes to it is kept as bytes; a leaf that a
spec passes on to the default spec, Equinox's or ours, is saved as an array.
"""

import io
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._format.leaf_record import CannotSave
from ..._types import KeyPath, Spec
from .key_paths import key_paths
from .leaf_kinds import describe, describe_like, Skipped, Written
from .transient import is_transient


def checked_specs(filter_spec: PyTree) -> list[tuple[KeyPath, Spec]]:
    """The functions of a `filter_spec`, with their key paths."""
    specs = key_paths(filter_spec)
    for path, spec in specs if filter_spec is not None else [((), None)]:
        if not callable(spec) and not is_transient(spec):
            at = f" at `{jtu.keystr(path)}`" if path else ""
            raise TypeError(
                f"`filter_spec` has {spec!r}{at}. Pass a function `(f, leaf)`, or a "
                "PyTree of such functions."
            )
    return specs


class LeafWriter(io.BytesIO):
    """The file `f` of one leaf that is being saved; `f.name` and `f.path` say which.

    A spec may close it, as `io.TextIOWrapper` does; what was written is kept.
    """

    def __init__(self, name: str, path: KeyPath) -> None:
        super().__init__()
        self.name = name
        self.path = path
        self.saved: list[Any] = []
        self.is_written = False
        self.content = b""

    def write(self, data: Any, /) -> int:
        self.is_written = True
        return super().write(data)

    def writelines(self, lines: Iterable[Any], /) -> None:
        for line in lines:
            self.write(line)

    def close(self) -> None:
        if not self.closed:
            self.content = self.getvalue()
        super().close()


class LeafReader(io.BufferedReader):
    """The file `f` of one leaf that is being restored.

    It holds what Equinox would have written: the bytes of a custom `filter_spec`, or
    the leaf as an `.npy` file. The checkpoint is read when `f` is first read.
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
    """Save a leaf as this package does; do nothing if it is not an array or number.

    Also works as the `filter_spec` of `equinox.tree_serialise_leaves`.

    **Arguments:**

    - `f`: the file of the leaf, as it is passed to a `filter_spec`. `f.name` is the
        leaf's name and `f.path` its JAX key path.
    - `x`: the leaf to save. It may differ from the leaf that the `filter_spec` was
        called with, such as a cast copy; this one is saved.

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
    """Restore a leaf as this package does; return `x` if it was not saved.

    Also works as the `filter_spec` of `equinox.tree_deserialise_leaves`.

    **Arguments:**

    - `f`: the file of the leaf, as it is passed to a `filter_spec`. `f.name` is the
        leaf's name and `f.path` its JAX key path.
    - `x`: the leaf of `like`: its shape and dtype are checked, its sharding is used.

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


def array_deserialise_filter_spec(f: Any, x: Any) -> Any:
    """Restore a leaf as this package does, but leave Python numbers as they are.

    A rate of dropout, a flag, or a number of heads is a leaf, too. With this function
    as `filter_spec`, or as that of a part of the tree, such numbers are those of your
    code, and arrays those of the checkpoint. It is as fast as the default.

    Also works as the `filter_spec` of `equinox.tree_deserialise_leaves`.

    **Arguments:**

    - `f`: the file of the leaf, as it is passed to a `filter_spec`.
    - `x`: the leaf of `like`.

    **Returns:**

    The leaf from the checkpoint, or `x` if that is a `bool`, `int`, `float` or
    `complex`.

    **Raises:**

    - [`eqx_ckpt.LeafMismatchError`][]: the leaf is missing, or differs from `x`.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        tree = {"model": {"w": jnp.ones(3), "dropout": 0.1}, "step": 100}
        eqx_ckpt.tree_serialise_leaves("numbers", tree)

        like = {"model": {"w": jnp.zeros(3), "dropout": 0.3}, "step": 0}
        spec = {
            "model": eqx_ckpt.array_deserialise_filter_spec,
            "step": eqx_ckpt.default_deserialise_filter_spec,
        }
        new = eqx_ckpt.tree_deserialise_leaves("numbers", like, spec)
        assert (new["model"]["dropout"], new["step"]) == (0.3, 100)
        ```
    """
    if is_number(x):
        if not isinstance(f, LeafReader):
            eqx.default_deserialise_filter_spec(f, x)  # The file has it all the same.
        return x
    return default_deserialise_filter_spec(f, x)


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number of Python, and not a scalar of NumPy."""
    is_python = isinstance(leaf, bool | int | float | complex)
    return is_python and not isinstance(leaf, np.generic)


def saved_by(spec: Spec, f: LeafWriter, leaf: Any) -> Any:
    """What a custom `filter_spec` saves of a leaf; it is called once.

    The leaf (or another one) that it passed to a default spec, or the bytes that it
    wrote, or that it skipped the leaf.
    """
    with _naming(f.name), _explaining(leaf), jax.ensure_compile_time_eval():
        spec(f, leaf)
    f.close()
    if len(f.saved) > 1 or (f.saved and f.is_written):
        raise ValueError(
            f"The `filter_spec` saved leaf {f.name!r} more than once: call the default "
            "spec once, or write bytes to `f`, but not both."
        )
    if f.saved:
        return f.saved[0]
    if not f.is_written:
        return Skipped(leaf)
    return leaf if _is_handed_on(f.content, leaf) else Written(f.content)


def restored_by(spec: Spec, f: LeafReader, like: Any) -> Any:
    """What a custom `filter_spec` restores for a leaf."""
    # Inside of `jax.jit`, too, a spec makes values.
    with _naming(f.name), jax.ensure_compile_time_eval():
        return spec(f, like)


@contextmanager
def _naming(name: str) -> Generator[None, None, None]:
    """Add the name of the leaf to whatever a user's `filter_spec` raises."""
    try:
        yield
    except Exception as e:
        e.add_note(f"This was raised by the `filter_spec` at leaf {name!r}.")
        raise


@contextmanager
def _explaining(leaf: Any) -> Generator[None, None, None]:
    """Explain the error of a spec that needs an array on this host which is not.

    Equinox's default calls `np.save`, which needs the whole array.
    """
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if not isinstance(leaf, jax.Array) or str(error) != _problem_on_host(leaf):
            raise
        describe(leaf)  # A donated array may have been deleted.
        raise CannotSave(
            "cannot be copied to this host as a whole, as Equinox's default does; "
            "call `eqx_ckpt.default_serialise_filter_spec` for it"
        ) from error


def _problem_on_host(leaf: jax.Array) -> str | None:
    try:
        np.asarray(leaf)
    except (RuntimeError, TypeError) as error:
        return str(error)
    return None


def _is_handed_on(content: bytes, leaf: Any) -> bool:
    """Whether a spec wrote what Equinox's default writes for a leaf that we can save.

    If it is a plain NumPy array of a dtype that only `.npy` files have, such as text,
    the file is kept. Pickled objects are not: `np.load` refuses them.
    """
    expected = _Expected(content)
    try:
        eqx.default_serialise_filter_spec(expected, leaf)
    except Exception:  # Leaves that it cannot write, or writes in a different way.
        return False
    if not content or expected.position < len(content):
        return False
    is_plain = type(leaf) is np.ndarray or isinstance(leaf, np.generic)
    record = describe_like(leaf)
    is_unknown = record is not None and record.kind == "unknown"
    return not (is_plain and is_unknown) or leaf.dtype.hasobject


class _Expected:
    """A file that compares what is written to it, instead of keeping a second copy."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.position = 0

    def write(self, data: bytes) -> int:
        end = self.position + len(data)
        if self._content[self.position : end] != data:
            raise ValueError("This is not what was to be written.")
        self.position = end
        return len(data)
