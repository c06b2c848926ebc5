"""Checkpoints of Equinox models: each array of a PyTree under its own name.

`help` of each name has its arguments, what it raises, and an example. Begin with these:

- `tree_serialise_leaves` saves a PyTree; `tree_serialise_leaves_async` saves it in the
    background.
- `tree_deserialise_leaves` restores it, or a part of it, onto any devices.
- `CheckpointManager` saves the steps of a training, deletes old ones, and restores the
    newest.

If the code has changed, or the devices:

- `tree_match` says what a restore would do, and `tree_like` what is there.
- `restore_or_init` restores what is there, and initialises the rest.
- `rename` restores leaves under other names; `shard_like` says where each goes.
- `default_serialise_filter_spec`, `default_deserialise_filter_spec` and
    `array_deserialise_filter_spec` save and restore a leaf, as functions for a
    `filter_spec`.

For a manager: `keep_last`, `keep_every` and `keep_best` say which steps stay;
`save_every_steps`, `save_every_seconds` and `save_when_idle` when to save; a `Mirror`
is a second place for its steps, to which `sync` uploads without a manager.

Besides: `load` reads without a PyTree, into NumPy arrays; `average` is the average of
checkpoints; `copy` copies one; a `StorePath` is a path in an object store.

Every error is a `CheckpointError`, or an `OSError` of the system:
`CheckpointNotFoundError`, `CheckpointExistsError`, `CorruptCheckpointError`,
`LeafNameError`, `LeafMismatchError`.

The modules: `inspect` looks at checkpoints and runs, `interop` reads and writes other
formats, `data` draws batches, `recording` records samples, `typing` has the types of
arguments. In a shell, `eqx-ckpt --help` does the same.
"""

import importlib as _importlib
from typing import Any as _Any

import lazy_loader as _lazy_loader


# Python cannot import it once the main thread has ended.
_importlib.import_module("concurrent.futures.thread")

# `__init__.pyi` has the names. Each is imported at its first use, so that the command
# line, which only inspects checkpoints, need not import JAX.
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
