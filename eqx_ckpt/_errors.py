"""The errors of this package.

```
CheckpointError
├── CheckpointNotFoundError  (also a FileNotFoundError)
├── CheckpointExistsError    (also a FileExistsError)
├── CorruptCheckpointError
├── LeafNameError            (also a ValueError)
└── LeafMismatchError        (also a ValueError)
```

Failures of the operating system (no space, no permission) stay what Python calls them:
`OSError` with its `errno`.
"""


class CheckpointError(Exception):
    """Any failure of this package; raised itself for leaves that cannot be saved."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint at this path."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """Something is at this path already, and it was left as it is."""


class CorruptCheckpointError(CheckpointError):
    """The bytes at rest are not the bytes that were saved."""


class LeafNameError(CheckpointError, ValueError):
    """Leaves of a PyTree cannot be given distinct names that are safe on disk."""


class LeafMismatchError(CheckpointError, ValueError):
    """The checkpoint does not agree with `like`, or an argument not with its PyTree."""
