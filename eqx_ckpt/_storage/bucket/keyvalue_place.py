"""Values of keys, in a TensorStore key-value store."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TYPE_CHECKING, TypeVar

from ..._errors import CheckpointError, CorruptCheckpointError
from ..._format.manifest import MANIFEST, MAX_BYTES
from ..._format.manifest_parser import HEAD_BYTES
from ..._types import Layout
from ..calls.tensorstore_calls import (
    check_written,
    is_out_of_range,
    KvSpec,
    open_kvstore,
    value_of,
    wait_for,
)
from ..chunks.chunk_values import ChunkValues
from ..chunks.ocdbt_database import Database
from ..interface.place import Chunks, DatabaseOptions, Storage


if TYPE_CHECKING:
    import tensorstore as ts


# Requests made before the first of them is awaited.
_AT_ONCE = 1000


# Reading this many bytes costs no more than a request.
_SHORT = 2**16


S = TypeVar("S", bound="KeyValues")


class Versioned(NamedTuple):
    """A value, and its generation for a conditional write.

    `value` is `None` if there is none, which is a version too.
    """

    value: bytes | None
    version: bytes


@dataclass(frozen=True, eq=False)
class KeyValues(Storage):
    """A location in a key-value store; subclasses say which.

    **Attributes:**

    - `scheme`: what its URLs begin with.
    """

    spec: KvSpec
    is_state: bool = False
    scheme: ClassVar[str]
    layouts: ClassVar[Mapping[Layout, Callable[[Storage], Chunks]]] = {
        "zarr": ChunkValues,
        "ocdbt": Database,
    }
    # A store gets a new manifest for each transaction: to replace one on a condition is
    # more than some can, and TensorStore would try for ever. Its files are smaller, so
    # that several are sent at a time. Values that are next to each other in a file are
    # read by one request.
    database: ClassVar[DatabaseOptions] = DatabaseOptions(
        read={
            "experimental_read_coalescing_threshold_bytes": 2**20,
            "experimental_read_coalescing_merged_bytes": 8 * 2**20,
            "experimental_read_coalescing_interval": "1ms",
        },
        write={
            "config": {"manifest_kind": "numbered"},
            "target_data_file_size": 32 * 2**20,
        },
        max_transaction=256 * 2**20,
        waits=False,
    )

    def url(self, key: str = "") -> str:
        bucket = self.spec["bucket"] + "/" if "bucket" in self.spec else ""
        path = self.spec["path"] + key if key else self.spec["path"].rstrip("/")
        return f"{self.scheme}://{bucket}{path}"

    def as_state(self: S) -> S:
        return replace(self, is_state=True)

    def at(self: S, path: str) -> S:
        return replace(self, spec={**self.spec, "path": path})

    def open(self) -> "ts.KvStore":
        return open_kvstore(self.spec)

    def wait_for(self, future: Any, key: str = "", most: float | None = None) -> Any:
        return wait_for(future, self.url(key), most)

    def read(self, key: str, most: int = MAX_BYTES + 1) -> bytes | None:
        return self.read_version(key, most).value

    def read_version(self, key: str, most: int = MAX_BYTES + 1) -> Versioned:
        store = self.open()
        # Of a long part, first its last byte: a store sends all that it has of a range,
        # and TensorStore then refuses it.
        first = slice(most - 1, most) if most > _SHORT else slice(0, most)
        reading = store.read(key, byte_range=first)
        try:
            found = self.wait_for(reading, key)
            if first.start and found.state == "value":
                reading = store.read(key, byte_range=slice(0, most))
                found = self.wait_for(reading, key)
        except CheckpointError:
            if not is_out_of_range(reading.exception()):
                raise
            # The value is shorter than that.
            found = self.wait_for(store.read(key), key)
        return Versioned(value_of(found, self.url(key)), found.stamp.generation)

    def read_all(
        self, keys: Sequence[str]
    ) -> Iterator[bytes | CorruptCheckpointError | None]:
        store = self.open()
        for key, future in [(key, store.read(key)) for key in keys]:
            try:
                yield value_of(self.wait_for(future, key), self.url(key))
            except CorruptCheckpointError as e:
                yield e

    def list_keys(self, prefix: str = "") -> list[str]:
        import tensorstore as ts

        after = prefix and prefix[:-1] + chr(ord(prefix[-1]) + 1)
        keys = self.wait_for(self.open().list(ts.KvStore.KeyRange(prefix, after)))
        return [key.decode(errors="replace") for key in keys]

    def folders(self) -> list[str]:
        names = [key.partition("/") for key in self.list_keys()]
        return sorted({name for name, slash, _ in names if name and slash})

    def is_listed(self, key: str) -> bool:
        return False

    def identity(self) -> object:
        return self.read(MANIFEST, HEAD_BYTES)

    def write(self, key: str, value: bytes, version: bytes | None = None) -> bool:
        """Write a value if the key still has this version; whether it was written.

        `False` after a lost response to a successful write: then read the key.
        """
        stamp = self.wait_for(self.writing(key, value, version), key)
        if version is None:
            check_written(stamp, self.url(key))
        return bool(stamp.generation)

    def writing(
        self,
        key: str,
        value: bytes | None,
        version: bytes | None = None,
        *,
        retries: bool = True,
    ) -> Any:
        """A future of such a write, or of a deletion; perhaps of a single request."""
        store = open_kvstore(self.spec, retries=retries)
        return store.write(key, value, if_equal=version)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete values, many at a time."""
        store = self.open()
        for i in range(0, len(keys), _AT_ONCE):
            deleting = [store.write(key, None) for key in keys[i : i + _AT_ONCE]]
            try:
                for future in deleting:
                    check_written(self.wait_for(future), self.url())
            except BaseException:
                for future in deleting:
                    future.cancel()
                raise

    def delete_below(self, prefix: str) -> None:
        """Delete every key that starts with `prefix`, which ends with `/`.

        TensorStore's `delete_range` deletes one after the other in S3.
        """
        below = self / prefix
        below.delete(below.list_keys())
