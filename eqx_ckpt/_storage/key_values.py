"""Values by their keys, in whatever a checkpoint is kept in."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .._errors import CorruptCheckpointError
from .._format.manifest import MAX_BYTES
from .kvstore import KvSpec, kvstore, open_file, result, shown, url


# Seconds, for one small request to an object store, with all its retries.
PATIENCE = 30.0
# Bytes that cost no more than a request.
_SHORT = 2**16


def read_key(base: KvSpec, key: str, most: int = MAX_BYTES + 1) -> bytes | None:
    """The value of a key, or its first `most` bytes; `None` if there is none."""
    if base["driver"] != "file":
        return read_version(base, key, most).value
    fd = open_file(base, key)
    if fd is None:
        return None
    with open(fd, "rb") as f:
        return f.read(most)


def read_keys(
    base: KvSpec, keys: Sequence[str]
) -> Iterator[bytes | CorruptCheckpointError | None]:
    """The values of several keys: what is wrong with one, or `None` for none."""
    on_disk = base["driver"] == "file"
    store = None if on_disk else kvstore(base)
    reading = [store and store.read(key) for key in keys]
    for key, future in zip(keys, reading, strict=True):
        try:
            if future is None:
                yield read_key(base, key)
            else:
                found = result(future, url(base, key))
                yield found.value if found.state == "value" else None
        except CorruptCheckpointError as e:
            yield e


class Versioned(NamedTuple):
    """A value, and what a condition calls it.

    `value` is `None` if there is none, which is a version too.
    """

    value: bytes | None
    version: bytes


def read_version(base: KvSpec, key: str, most: int = MAX_BYTES + 1) -> Versioned:
    store, where = kvstore(base), url(base, key)
    # Of a long part, first its last byte: a store sends all that it has of a range, and
    # TensorStore then refuses it.
    first = slice(most - 1, most) if most > _SHORT else slice(0, most)
    try:
        found = result(store.read(key, byte_range=first), where, PATIENCE)
        if first.start and found.state == "value":
            part = store.read(key, byte_range=slice(0, most))
            found = result(part, where, PATIENCE)
    except CorruptCheckpointError:
        # It is shorter than that.
        found = result(store.read(key), where, PATIENCE)
    value = found.value if found.state == "value" else None
    return Versioned(value, found.stamp.generation)


def write_key(
    base: KvSpec, key: str, value: bytes, version: bytes | None = None
) -> bool:
    """Write a value, if the key still has this version; whether it was written.

    After a lost answer this is `False` for a value that was written: look at the key.
    """
    writing = kvstore(base).write(key, value, if_equal=version)
    try:
        return bool(result(writing, url(base, key), PATIENCE).generation)
    finally:
        writing.cancel()  # Nobody is to try again when its caller has given up.


def list_keys(base: KvSpec) -> list[str]:
    """All keys, relative to `base`."""
    store = kvstore(base)
    keys = result(store.list(), shown(base))
    if base["driver"] == "gcs":
        # TensorStore takes a listing that is denied for an empty one.
        result(store.read("@"), shown(base), PATIENCE)
    return [key.decode(errors="replace") for key in keys]


def delete_keys(base: KvSpec, keys: Sequence[str]) -> None:
    store = kvstore(base)
    for future in [store.write(key, None) for key in keys]:
        result(future, shown(base))


def delete_below(base: KvSpec, prefix: str) -> None:
    """Delete every key that starts with `prefix`, which is not empty."""
    import tensorstore as ts

    end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
    deleting = kvstore(base).delete_range(ts.KvStore.KeyRange(prefix, end))
    result(deleting, url(base, prefix))
