"""Directories that are a bucket of an object store, mounted by FUSE."""

import os

from ..._errors import warn
from ..calls.opening import reading


# Programs that mount buckets, and what to pass instead.
_INSTEAD = {
    "gcsfuse": "gs://",
    "s3fs": "s3://",
    "goofys": "s3://",
    "geesefs": "s3://",
    "mountpoint-s3": "s3://",
    "rclone": "s3:// or gs://",
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
    program = _program_of(device)
    if program in _INSTEAD:
        warn(
            f"{directory!r} is on {program}, an object store behind FUSE: what is "
            "saved there may be seen in part, and may be lost when the program or the "
            f"machine ends. Pass the URL of the bucket, {_INSTEAD[program]}..., which "
            "also takes fewer requests."
        )


def _program_of(device: int) -> str:
    """The program behind the FUSE mount of a device, if Linux says it; otherwise `''`.

    The type is `fuse.gcsfuse`, say. It may be `fuse` alone, as of Mountpoint for Amazon
    S3; then its source may be the program, or the name of a bucket.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with reading(_MOUNTS) as f:
            mounts = [line.decode(errors="replace").split() for line in f]
    except OSError:
        return ""
    for fields in mounts:
        # Both follow a hyphen, after fields of which there may be any number.
        if "-" in fields[:-2] and fields[2] == number:
            kind, source = fields[fields.index("-") + 1 :][:2]
            return source if kind == "fuse" else kind.partition("fuse.")[2]
    return ""
