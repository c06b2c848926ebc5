"""Translate TensorStore's errors, which are `ValueError`s with a status as text."""

import errno
import os
import re

from .._errors import CheckpointError, CorruptCheckpointError
from .url import censored


# The rest has the store's response, which may repeat a token, and the whole spec.
_DETAILS = re.compile(r"\s*\[[a-z_ -]+=.*", re.S)
_DENIED = re.compile(
    "^PERMISSION_DENIED|^UNAUTHENTICATED|(?i:credentials)|AuthorizationHeaderMalformed|"
    "(Expired|Invalid)Token|InvalidAccessKeyId|InvalidSecurity|PermanentRedirect|"
    "SignatureDoesNotMatch|TokenRefreshRequired|invalid_(client|grant|rapt)"
)
_MOST_SHOWN = 1000
# Of Ceph and SeaweedFS, MinIO, and others.
_FULL = re.compile(
    "Quota(Limit)?Exceeded|StorageFull|InsufficientStorage|InsufficientCapacity"
)
_BUSY = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")
# A database is decoded before its checksum is compared, so any error is possible.
_DAMAGED = re.compile(
    "^DATA_LOSS|^NOT_FOUND|^FAILED_PRECONDITION|^OUT_OF|Error decoding"
)
_NO_CONDITION = "a condition failed, but the request had none"
_STATUS = re.compile(r"\[http_response_code='(\d+)'")
# For missing objects, failed conditions, and ranges beyond the end of an object.
_NO_REFUSALS = {"404", "410", "412", "416"}


def translated(error: Exception, name: str) -> Exception:
    """The error to raise instead of TensorStore's; `name` is a leaf or a location."""
    whole = str(error)
    # It repeats what it cannot read, which may be all of a file.
    text = censored(_DETAILS.sub("", whole))[:_MOST_SHOWN]
    if code := re.search(r"\[os_error_code='(\d+)'", whole):
        number = int(code[1])
        return OSError(number, f"{os.strerror(number)} ({name!r}: {text})")
    if text.startswith("DATA_LOSS"):
        return CorruptCheckpointError(text)
    if "bucket does not exist" in text or "NoSuchBucket" in text:
        return no_bucket(name)
    if _FULL.search(text) or "[http_response_code='507'" in whole:
        return OSError(
            errno.EDQUOT,
            f"The store is full, or a quota is used up ({name}: {text}). Delete what "
            "is no longer needed, or enlarge the quota",
        )
    if "RequestTimeTooSkewed" in text:
        return PermissionError(
            errno.EACCES,
            f"The store denies {name}, because the clock of this machine is wrong: "
            f"{text}. Set it",
        )
    if _DENIED.search(text):
        return PermissionError(
            errno.EACCES,
            f"The store denies {name} ({text}). Look at the credentials, what they "
            "allow, and the region",
        )
    if text.startswith(_BUSY):
        return ConnectionError(
            f"The store of {name} does not answer, or is too busy: {text}"
        )
    status = status_of(error)
    if status.startswith("4") and status not in _NO_REFUSALS:
        return CheckpointError(f"The store refuses {name}: {text}")
    # An object that is missing is a value, and no error.
    if status in ("404", "410"):
        return CheckpointError(
            f"The store knows nothing at {name}: {text}. Look at the endpoint and the "
            "bucket."
        )
    if status in ("304", "412"):
        return contradicts(name)
    if status.startswith("3"):
        return CheckpointError(
            f"The store sends requests for {name} elsewhere (status {status}), which "
            "are not followed. Look at the endpoint and the region."
        )
    if "etag not found" in text:
        return CheckpointError(
            f"The server of {name} answers without an ETag, as no store does: {text}. "
            "Look at the endpoint, and for a proxy in between."
        )
    if _DAMAGED.search(text):
        return CorruptCheckpointError(text if name in text else f"{text} ({name})")
    return CheckpointError(f"TensorStore failed at {name!r}: {text}")


def status_of(error: BaseException | None) -> str:
    """The status of an HTTP response in TensorStore's error, or `''`."""
    found = _STATUS.search(str(error))
    return found[1] if found else ""


def contradicts(name: str, what: str = _NO_CONDITION) -> ConnectionError:
    """The error for answers of a store of which at least one is wrong."""
    return ConnectionError(
        f"The answers of the store about {name} contradict each other: {what}. Nothing "
        "is concluded from that. Try again; if it stays so, look at what is between "
        "this machine and the store."
    )


def no_bucket(name: str) -> CheckpointError:
    return CheckpointError(f"{name}: there is no such bucket. Make it first.")
