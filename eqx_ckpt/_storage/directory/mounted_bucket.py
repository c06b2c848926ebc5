"""Directories that are a bucket of an object store, mounted by FUSE."""

import os
import warnings

from ..calls.opening import reading


# The type that each of these programs gives its mounts, and what to pass instead.
_INSTEAD = {
    "fuse.gcsfuse": "gs://",
    "fuse.s3fs": "s3://",
    "fuse.goofys": "s3://",
    "fuse.mountpoint-s3": "s3://",
    "fuse.rclone": "s3:// or gs://",
}


_MOUNTS = "/proc/self/mountinfo"


# The devices that were looked at.
_known: set[int] = set()


def warn_of_bucket(directory: str, folder: int) -> None:
    """Warn, once, if a directory that is open is a bucket behind FUSE.

    There, no rename of a directory is one step, and there are no links and no locks
    that others see: a checkpoint may be there in part.
    """
    device = os.fstat(folder).st_dev
    if device in _known:
        return
    _known.add(device)
    kind = _type_of(device)
    if kind in _INSTEAD:
        warnings.warn(
            f"{directory!r} is on {kind}, an object store behind FUSE: what is saved "
            "there may be seen in part, and may be lost when the program or the "
            f"machine ends. Pass the URL of the bucket, {_INSTEAD[kind]}..., which "
            "also takes fewer requests.",
            stacklevel=2,
        )


def _type_of(device: int) -> str:
    """The type of the file system of a device, as Linux says it; otherwise `''`."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with reading(_MOUNTS) as f:
            mounts = [line.decode(errors="replace").split() for line in f]
    except OSError:
        return ""
    for fields in mounts:
        # The type follows a hyphen, after fields of which there may be any number.
        if "-" in fields[:-1] and fields[2] == number:
            return fields[fields.index("-") + 1]
    return ""
