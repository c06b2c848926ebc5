"""Values by their keys, in whatever a checkpoint is kept in."""

import logging
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from typing import NamedTuple

from .._errors import CorruptCheckpointError
from .._format.manifest import MAX_BYTES
from .kvstore import KvSpec, kvstore, open_file, url
from .patience import answer, LAST_PATIENCE
from .translate import no_bucket


logger = logging.getLogger("eqx_ckpt")

# Requests that are made before the first of them is waited for.
_AT_ONCE = 1000
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
                found = answer(base, future, key)
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
    store = kvstore(base)
    # Of a long part, first its last byte: a store sends all that it has of a range, and
    # TensorStore then refuses it.
    first = slice(most - 1, most) if most > _SHORT else slice(0, most)
    try:
        found = answer(base, store.read(key, byte_range=first), key)
        if first.start and found.state == "value":
            part = store.read(key, byte_range=slice(0, most))
            found = answer(base, part, key)
    except CorruptCheckpointError:
        # It is shorter than that.
        found = answer(base, store.read(key), key)
    value = found.value if found.state == "value" else None
    return Versioned(value, found.stamp.generation)


def write_key(
    base: KvSpec, key: str, value: bytes, version: bytes | None = None
) -> bool:
    """Write a value, if the key still has this version; whether it was written.

    After a lost answer this is `False` for a value that was written: look at the key.
    """
    writing = kvstore(base).write(key, value, if_equal=version)
    return bool(answer(base, writing, key).generation)


def list_keys(base: KvSpec) -> list[str]:
    """All keys, relative to `base`."""
    store = kvstore(base)
    keys = answer(base, store.list())
    if base["driver"] == "gcs":
        # TensorStore takes a listing that is denied for an empty one.
        answer(base, store.read("@"))
    return [key.decode(errors="replace") for key in keys]


def check_bucket(base: KvSpec) -> None:
    """Raise if there is no bucket, after nothing was found in it by a listing.

    In S3 that has raised already. In GCS, TensorStore takes everything in it for
    missing. To ask Google whether there is a bucket, nobody needs to say who asks.
    """
    if base["driver"] != "gcs":
        return
    google = os.environ.get(
        "TENSORSTORE_GCS_HTTP_URL", "https://storage.googleapis.com"
    )
    place = f"{google.rstrip('/')}/storage/v1/b/{base['bucket']}"
    try:
        urllib.request.urlopen(place, timeout=LAST_PATIENCE).close()
    except urllib.error.HTTPError as e:
        e.close()
        if e.code == HTTPStatus.NOT_FOUND:
            raise no_bucket(url(base)) from None
    except (OSError, ValueError) as e:
        logger.debug("Whether %s exists is not known: %s", base["bucket"], e)


def delete_keys(base: KvSpec, keys: Sequence[str]) -> None:
    """Delete values, many at a time."""
    store = kvstore(base)
    for i in range(0, len(keys), _AT_ONCE):
        deleting = [store.write(key, None) for key in keys[i : i + _AT_ONCE]]
        try:
            for future in deleting:
                answer(base, future)
        except BaseException:
            for future in deleting:
                future.cancel()
            raise


def delete_below(base: KvSpec, prefix: str) -> None:
    """Delete every key that starts with `prefix`.

    TensorStore's own way to do that deletes one after the other in S3.
    """
    below = {**base, "path": base["path"] + prefix}
    delete_keys(below, list_keys(below))
