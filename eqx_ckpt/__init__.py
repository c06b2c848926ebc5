"""Checkpoints of Equinox models: each leaf under its own name. See README.md.

`__init__.pyi` has the names. Each is imported at its first use, so that the command
line, which only inspects checkpoints, need not import JAX.
"""

import importlib as _importlib
from typing import Any as _Any

import lazy_loader as _lazy_loader


# Python cannot import it once the main thread has ended.
_importlib.import_module("concurrent.futures.thread")

_attribute, _names, __all__ = _lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> _Any:
    if name == "__version__":
        from importlib.metadata import version

        value = version("eqx-ckpt")
    else:
        value = _attribute(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return ["__version__", *_names()]
