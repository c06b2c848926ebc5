"""Import JAX, Equinox and NumPy at their first use: reading a manifest needs none.

Their import takes a second, longer than `eqx-ckpt ls` takes as a whole. What
`ls` and `tree` need imports them from here.
"""

import importlib
import sys
from typing import Any, TYPE_CHECKING, TypeAlias


class _Later:
    """Stands for a module, which is imported when one of its attributes is accessed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(_loaded(self._name), attribute)
        setattr(self, attribute, value)
        return value


def _loaded(name: str) -> Any:
    # Registers JAX's dtypes, such as bfloat16, with NumPy.
    importlib.import_module("ml_dtypes")
    return importlib.import_module(name)


if TYPE_CHECKING:
    import equinox as eqx
    import jax as jax
    import jax.core  # pyright: ignore[reportUnusedImport]
    import jax.numpy as jnp
    import jax.tree_util as jtu
    import numpy as np

    Array: TypeAlias = np.ndarray
    DType: TypeAlias = np.dtype
    __all__ = ["Array", "DType", "eqx", "jax", "jnp", "jtu", "np"]
else:
    eqx, jax, jnp, jtu, np = (
        _loaded(name) if name in sys.modules else _Later(name)
        for name in ("equinox", "jax", "jax.numpy", "jax.tree_util", "numpy")
    )
    Array = DType = Any
