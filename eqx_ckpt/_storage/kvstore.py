"""TensorStore's contexts, specs and futures."""

import json
import os
from typing import Any, TYPE_CHECKING

from .._errors import CheckpointError
from .._format.leaves import LeafRecord
from .._format.manifest import zarr_json
from .storage import KvSpec
from .translate import contradicts, translated
from .window import STALLED


# Importing TensorStore takes longer than all the rest of this package, so the functions
# that need it do.
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


def context() -> "ts.Context":
    """The context of the whole process: it holds threads, and the data of `memory://`.

    Files are not synced one by one, and not locked: an attempt has a directory of its
    own, and the commit flushes it at once. A lock that a dead process left would be
    written over without being cut, which stores its tail behind the new value.
    """
    pid = os.getpid()
    if pid not in _contexts:
        if _contexts:
            raise CheckpointError(
                "This process was forked from one that had used TensorStore, which "
                "does not survive that. Start it with the method `spawn`, or save and "
                "restore in its parent only."
            )
        for name, value in _STALLED.items():
            os.environ.setdefault(name, value)
        import tensorstore as ts

        _contexts[pid] = ts.Context(
            {
                "file_io_sync": False,
                "file_io_locking": {"mode": "none"},
                "s3_request_retries": _RETRIES,
                "gcs_request_retries": _RETRIES,
            }
        )
    return _contexts[pid]


def array_spec(
    record: LeafRecord, known: dict[tuple[Any, ...], "ts.Spec"]
) -> "ts.Spec":
    """The spec to open an array, parsed once for all arrays of one type."""
    import tensorstore as ts

    key = record[:9]
    if key not in known:
        # Without the last two, TensorStore skips all-zero chunks and reads a lost chunk
        # as zeros. See tests/faults/test_damage.py.
        known[key] = ts.Spec(
            {
                "driver": "zarr3",
                "metadata": json.loads(zarr_json(key)),
                "store_data_equal_to_fill_value": True,
                "fill_missing_data_reads": False,
            }
        )
    return known[key]


def own_context() -> "ts.Context":
    """A context for a database, whose caches have seen no other at its path."""
    import tensorstore as ts

    return ts.Context({"cache_pool": {"total_bytes_limit": 0}}, context())


def _without_retries() -> "ts.Context":
    """A context in which each request is sent once."""
    import tensorstore as ts

    never = {"s3_request_retries": _NEVER, "gcs_request_retries": _NEVER}
    return ts.Context(never, context())


def open_kvstore(spec: KvSpec, *, retries: bool = True) -> "ts.KvStore":
    """Open the key-value store of a spec; a database gets its own caches."""
    import tensorstore as ts

    used = own_context() if "base" in spec else context()
    used = used if retries else _without_retries()
    return wait_for(ts.KvStore.open(spec, context=used), spec["driver"])


def value_of(found: Any, name: str) -> bytes | None:
    """The value that was read; `None` if there is none."""
    if found.state == "unspecified":
        raise contradicts(name)
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
