"""TensorStore's contexts, specs and futures."""

import errno
import os
import re
from typing import Any, TYPE_CHECKING, TypeAlias

from ..._errors import CheckpointError, CorruptCheckpointError
from .send_window import STALLED
from .store_path import BUCKET, censored
from .threads import ForkedLock


if TYPE_CHECKING:
    import tensorstore as ts


# About twenty seconds, for a store that is busy or unreachable.
_RETRIES = {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}


# A request that makes no progress for so many seconds is given up, and retried.
_STALLED = {
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": str(STALLED),
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
}


_NEVER = {"max_retries": 0}


# By process.
_contexts: "dict[int, ts.Context]" = {}


_making = ForkedLock()


def context() -> "ts.Context":
    """The context of the whole process: it holds threads, and the data of `memory://`.

    Files are not synced one by one, and not locked: an attempt has a directory of its
    own, and the commit flushes it at once. A lock that a dead process left would be
    written over without being cut, which stores its tail behind the new value.
    """
    # Another one that a second thread makes would not see what is in this one.
    with _making.own:
        pid = os.getpid()
        if pid not in _contexts:
            _contexts[pid] = _new_context()
        return _contexts[pid]


def _new_context() -> "ts.Context":
    if _contexts:
        raise CheckpointError(
            "This process was forked from one that had used TensorStore, which does "
            "not survive that. Start it with the method `spawn`, or save and restore "
            "in its parent only."
        )
    for name, value in _STALLED.items():
        os.environ.setdefault(name, value)
    import tensorstore as ts

    return ts.Context(
        {
            "file_io_sync": False,
            "file_io_locking": {"mode": "none"},
            "s3_request_retries": _RETRIES,
            "gcs_request_retries": _RETRIES,
            "http_request_retries": _RETRIES,
        }
    )


def own_context() -> "ts.Context":
    """A context for a database, whose caches have seen no other at its path."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": 0}}, context())


def _without_retries() -> "ts.Context":
    """A context in which each request is sent once."""
    import tensorstore as ts

    never = {"s3_request_retries": _NEVER, "gcs_request_retries": _NEVER}
    return ts.Context(never, context())


KvSpec: TypeAlias = dict[str, Any]


def resolved(spec: KvSpec) -> KvSpec:
    """The spec for TensorStore, in which the endpoint may name the bucket."""
    if "base" in spec:
        return {**spec, "base": resolved(spec["base"])}
    endpoint = spec.get("endpoint", "")
    if BUCKET not in endpoint:
        return spec
    endpoint = endpoint.replace(BUCKET, spec["bucket"])
    return {**spec, "endpoint": endpoint, "bucket": ""}


def open_kvstore(spec: KvSpec, *, retries: bool = True) -> "ts.KvStore":
    """Open the key-value store of a spec; a database gets its own caches."""
    import tensorstore as ts

    used = own_context() if "base" in spec else context()
    used = used if retries else _without_retries()
    where = _location(spec.get("base", spec))
    try:
        opening = ts.KvStore.open(resolved(spec), context=used)
    except ValueError as e:
        raise translated(e, where) from None
    return wait_for(opening, where)


def _location(spec: KvSpec) -> str:
    bucket = f"{spec['bucket']}/" if "bucket" in spec else ""
    place = f"{bucket}{spec.get('path', '')}" or spec.get("base_url", spec["driver"])
    return censored(place)


def value_of(found: Any, name: str) -> bytes | None:
    """The value that was read; `None` if there is none."""
    if found.state == "unspecified":
        raise contradicts(name)
    # In GCS, zero is that of an object that is not there: a page of HTML has no other.
    is_of_gcs = name.startswith("gs://")
    has_generation = found.stamp.generation.strip(b"\0") != b""
    if found.state == "value" and is_of_gcs and not has_generation:
        raise no_store(name, "a value without a generation")
    return found.value if found.state == "value" else None


def check_written(stamp: Any, name: str) -> None:
    """Raise if a write without a condition was refused because of one."""
    if not stamp.generation:
        raise contradicts(name)


def wait_for(future: Any, name: str, seconds: float | None = None) -> Any:
    """Wait for a TensorStore future; translate its error."""
    try:
        return future.result(timeout=seconds)
    except TimeoutError:
        raise TimeoutError(
            f"No answer within {seconds:g} seconds ({name}). Look at the endpoint and "
            "the credentials."
        ) from None
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as e:
        problem = translated(e, name)
    # Not in there, where TensorStore's error would be its context, with all details.
    raise problem


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


_STATUS = re.compile(r"\[(?:http_response_code='|HTTP code )(\d+)")


# For missing objects, and failed conditions.
_NO_REFUSALS = {"404", "410", "412"}


# Of a proxy that wants a login, and of a network that does.
_LOGIN = {"407", "511"}


# Of answers that no store gives: lists of S3 and of GCS, and replies for parts.
_NO_STORE = re.compile(
    "etag not found|Malformed List response|Failed to parse response metadata|"
    '^Expected object, but received|object member "items"|'
    "Content-Range header|byte range .* was ignored by server"
)


def translated(error: Exception, name: str) -> Exception:
    """The error to raise instead of TensorStore's; `name` is a leaf or a location."""
    whole = str(error)
    # It repeats what it cannot read, which may be all of a file.
    text = censored(_DETAILS.sub("", whole))[:_MOST_SHOWN]
    if number := os_error_of(error):
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
    if status in _LOGIN:
        return CheckpointError(
            f"A proxy or a network asks for a login before it passes requests for "
            f"{name} on (status {status}). Log in, or set `https_proxy` or `no_proxy`."
        )
    if status.startswith("4") and status not in _NO_REFUSALS:
        return CheckpointError(f"The store refuses {name} (status {status}): {text}")
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
    if _NO_STORE.search(text):
        return no_store(name, text)
    if _DAMAGED.search(text):
        return CorruptCheckpointError(text if name in text else f"{text} ({name})")
    return CheckpointError(f"TensorStore failed at {name!r}: {text}")


def os_error_of(error: BaseException) -> int:
    """The number of the system's error in TensorStore's, or 0."""
    found = re.search(r"\[os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else 0


def status_of(error: BaseException | None) -> str:
    """The status of an HTTP response in TensorStore's error, or `''`."""
    found = _STATUS.search(str(error))
    return found[1] if found else ""


def is_out_of_range(error: BaseException | None) -> bool:
    """Whether a value has fewer bytes than were asked for."""
    return str(error).startswith("OUT_OF_RANGE")


def contradicts(name: str, what: str = _NO_CONDITION) -> ConnectionError:
    """The error for answers of a store of which at least one is wrong."""
    return ConnectionError(
        f"The answers of the store about {name} contradict each other: {what}. Nothing "
        "is concluded from that. Try again; if it stays so, look at what is between "
        "this machine and the store."
    )


def no_store(name: str, answer: str) -> CheckpointError:
    return CheckpointError(
        f"The server of {name} answers as no store does: {answer}. Look at the "
        "endpoint, for a proxy in between, and for the page of a login."
    )


def no_bucket(name: str) -> CheckpointError:
    return CheckpointError(f"{name}: there is no such bucket. Create it first.")
