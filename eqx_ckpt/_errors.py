"""The errors of this package.

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


class CheckpointError(Exception):
    """The base class; itself raised where no subclass fits."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this path."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Something exists at this path already; it was not changed."""


class CorruptCheckpointError(CheckpointError):
    """The stored bytes are not the bytes that were saved."""


class LeafNameError(CheckpointError, ValueError):
    """Leaves of a PyTree cannot be given distinct names that are safe on disk."""


class LeafMismatchError(CheckpointError, ValueError):
    """The checkpoint does not match `like`, or an argument does not match a PyTree."""


for _error in (CheckpointError, *CheckpointError.__subclasses__()):
    _error.__module__ = "eqx_ckpt"  # As people import it, and as tracebacks show it.
