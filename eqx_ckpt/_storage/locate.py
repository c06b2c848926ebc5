"""Find the place that a path or a URL means."""

import os

from .._errors import CheckpointError
from .._types import as_text, PathLike
from .bucket.bucket_place import Bucket, GoogleBucket, Memory
from .bucket.keyvalue_place import KeyValues
from .bucket.remote_file import ObjectFile
from .bucket.web_file import WebFile
from .calls.opening import LONGEST_NAME, longest_name
from .calls.store_path import absolute, censored, remote_kvstore, StorePath, URL
from .directory.directory_place import Directory
from .directory.local_file import LocalFile
from .interface.foreign_file import ForeignFile
from .interface.place import Storage


_BUCKETS = {"s3": Bucket, "gs": GoogleBucket}


# Of servers of files, where nothing can be saved.
_WEB = ("http", "https")


def locate(path: PathLike) -> Storage:
    """Resolve a path or URL to a location in a storage."""
    text = path if type(path) is str else as_text(path)
    if not text or "\0" in text:
        raise CheckpointError(f"{text!r} is not a path. Pass a directory.")
    if URL.match(text):
        return _remote(path, text)
    text = absolute(text)
    folder = os.path.realpath(text)
    if "\\" in folder or not folder.isprintable():
        raise CheckpointError(
            f"{folder!r} has a backslash or a character that does not print, which "
            "TensorStore cannot be trusted with. Choose another directory."
        )
    if (longest := longest_name(folder)) > LONGEST_NAME:
        raise CheckpointError(
            f"A name in {folder[:300]!r} has {longest} bytes, and file systems take "
            f"{LONGEST_NAME}. Choose another directory."
        )
    spec = {"driver": "file", "path": folder.rstrip("/") + "/"}
    name = text.rstrip("/")
    if os.path.islink(name):
        above, name = os.path.split(name)
        return Directory(spec, os.path.join(os.path.realpath(above), name))
    return Directory(spec)


def locate_file(path: PathLike) -> ForeignFile:
    """Open the file of another program at a path or URL."""
    text = as_text(path)
    if not URL.match(text):
        return LocalFile(path)
    if is_web(text):
        return WebFile(text)
    place = locate(path)
    assert isinstance(place, KeyValues)
    above, _, name = place.spec["path"].rstrip("/").rpartition("/")
    if not name:
        raise CheckpointError(f"{place} is not a file. Pass the URL of one.")
    return ObjectFile(place.at(above and f"{above}/"), name)


def is_web(text: str) -> bool:
    """Whether a text is the URL of a file of a web server."""
    return text.partition("://")[0].lower() in _WEB


def names_in(path: PathLike) -> list[str] | None:
    """The names of the files in a folder; `None` if a path or a URL is not one."""
    text = as_text(path)
    if not URL.match(text):
        folder = os.path.expanduser(text)
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else None
    names = [] if is_web(text) else locate(path).list_keys()
    return sorted(name for name in names if "/" not in name) if names else None


def _remote(path: PathLike, url: str) -> Storage:
    scheme, has_slashes, rest = url.partition("://")
    if not has_slashes:
        raise CheckpointError(
            f"{censored(url)!r} is a URL that has lost a slash; `pathlib` cannot hold "
            "one. Pass a string such as `s3://bucket/path`, or an "
            "`eqx_ckpt.StorePath`; or what begins with `./`, if it is a directory."
        )
    if scheme in _BUCKETS:
        store = path if isinstance(path, StorePath) else StorePath(url)
        return _BUCKETS[scheme](remote_kvstore(store))
    if scheme == "memory":
        path = rest.strip("/")
        return Memory({"driver": "memory", "path": path and f"{path}/"})
    if is_web(url):
        raise CheckpointError(
            f"{censored(url)!r}: a checkpoint is not read from a web server, and not "
            "written to one. A file of safetensors or npz is read there by "
            "`eqx_ckpt.interop.open_source`."
        )
    raise CheckpointError(
        f"{censored(url)!r}: `{scheme}://` is not supported. Pass a directory, or "
        "a URL that begins with `s3://` or `gs://`."
    )
