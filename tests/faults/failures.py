"""Errors of a disk, and how they must look to the user."""

import errno

import eqx_ckpt

from .shim import KINDS


# Which operations fail with which error on a real disk.
ERRORS = {
    "EIO": KINDS,
    "ENOSPC": ("create", "write", "sync", "rename", "mkdir", "truncate", "link"),
    "EACCES": ("create", "open", "rename", "unlink", "mkdir", "link"),
}


def assert_says_why(error: Exception, name: str) -> None:
    """An `OSError` with the errno, in words that a user can read."""
    assert isinstance(error, OSError), repr(error)
    assert not isinstance(error, eqx_ckpt.CheckpointError), repr(error)
    assert error.errno == getattr(errno, name), repr(error)
    assert "tensorstore_spec" not in str(error)
    assert len(str(error)) < 1000
