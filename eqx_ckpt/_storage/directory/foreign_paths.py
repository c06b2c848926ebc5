"""What else a path may hold than a checkpoint of this package, and how to open it."""

import os
import re
from collections.abc import Iterable

from ..._errors import CheckpointError
from ..._format.sample_record import RECORD
from ..calls.opening import reading
from ..interface.place import ONE_CHECKPOINT, ONE_RECORDING
from ..interface.replacing import has_manifest, inside_of, whole_above


_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA")


# Of arrays of JAX that have numbers instead of names.
NUMBERED = "pytreedef.json"


_JAX = ("manifest.ocdbt", NUMBERED)


# How `metadata.json` begins in a step of Levanter.
_LEVANTER = re.compile(rb'\{"step": \d{1,18}, "timestamp": "')


_NUMPY = b"\x93NUMPY"


# Of a file, where lines of text may precede the first array of Equinox.
_HEAD_BYTES = 2**16


# The format of a file whose content does not say it, perhaps because it is damaged.
SUFFIXES = {
    ".eqx": "eqx",
    ".msgpack": "flax",
    ".npz": "npz",
    ".safetensors": "safetensors",
}


_ARRAY = {".zarray", "zarr.json"}


_INDEX = ".safetensors.index.json"


_MOST_SHOWN = 5


# So many files of a directory are looked at.
_MOST_TRIED = 100


_WORDS = {
    "eqx": "It is a file of Equinox",
    "flax": "It seems to be msgpack of flax",
    "jax_arrays": "It seems to have arrays of JAX or Levanter",
    "npy": "It is an array of NumPy",
    "npz": "It seems to be an archive of NumPy",
    "orbax": "It is of Orbax",
    "safetensors": "It is a file of safetensors",
}


def what_is_at(path: str) -> str:
    """A sentence about a path that is not a checkpoint, or nothing."""
    try:
        return _around(path) or (
            _file(path) if os.path.isfile(path) else _orbax(path) or _holds(path)
        )
    except (FileNotFoundError, NotADirectoryError):
        file = file_of_equinox(path)
        if os.path.isfile(file):
            return f"There is {file!r}. {_file(file)}"
        if os.path.exists(path):
            return "It is neither a file nor a directory."
        return "That path does not exist."
    except OSError as e:
        return f"It cannot be read: {e.strerror}."


def instead_of_a_run(path: str) -> str:
    """A sentence, if a directory is something else and so cannot be a run."""
    if os.path.isfile(path):
        return "It is a file, and a run is a directory."
    if not os.path.isdir(path):
        return ""
    if has_manifest(path):
        return ONE_CHECKPOINT
    if os.path.isfile(f"{path}/{RECORD}"):
        return ONE_RECORDING
    try:
        return _around(path) or _orbax(path)
    except OSError:
        return ""


def _around(path: str) -> str:
    """A sentence, if the path is inside a checkpoint."""
    what, above = whole_above(path)
    part = ""
    if what == "checkpoint":
        inside = os.path.relpath(path, above)
        part = os.path.dirname(inside) if os.path.isfile(path) else inside
    is_state = what == "recording" and has_manifest(path)
    return "" if is_state else inside_of(what, above, part)


def file_of_equinox(path: str) -> str:
    """The file that Equinox means by a path: it adds `.eqx` where there is no suffix.

    A file of exactly that path is meant, too, if it is the only one.
    """
    added = f"{path}.eqx"
    if os.path.splitext(path)[1]:
        return path
    if not os.path.isfile(path):
        return added
    if os.path.isfile(added):
        raise CheckpointError(
            f"There are both {path!r} and {added!r}, which is what Equinox opens for "
            "the former. Pass the latter, or rename one of them."
        )
    return path


def format_at(path: str) -> str:
    """The function of `eqx_ckpt.interop` that opens what is at a path, or `''`."""
    if os.path.isfile(path):
        return _of_file(path)
    if not os.path.lexists(path) and os.path.isfile(file_of_equinox(path)):
        return "eqx"
    return _of_folder(path)


def without_names(path: str, format: str) -> str:
    """That what is at a path has no names, without a full stop; `""` if it has some."""
    if format == "eqx":
        path = file_of_equinox(path)
        what = "an array of NumPy" if _is_npy(path) else "a file of Equinox"
        return f"{path!r} is {what}, which has no names"
    if format == "jax_arrays" and os.path.isfile(f"{path}/{NUMBERED}"):
        return f"{path!r} is of `pytree_serialization.save`, which numbers the leaves"
    return ""


def _is_npy(path: str) -> bool:
    return path.endswith(".npy")


def _of_file(path: str) -> str:
    with reading(path) as f:
        return format_of(path, f.read(_HEAD_BYTES), os.stat(path).st_size)


def format_of(path: str, head: bytes, size: int | None) -> str:
    """The function of `eqx_ckpt.interop` that opens a file that begins so, or `''`."""
    if head.startswith(_NUMPY):
        return "eqx"
    if head.startswith(b"PK") and (path.endswith(".npz") or _begins_with_npy(head)):
        return "npz"
    is_header = head[8:9] == b"{"
    if is_header and (size is None or int.from_bytes(head[:8], "little") < size):
        return "safetensors"
    if path.endswith(_INDEX):
        return "safetensors"
    of_text = "eqx" if b"\n" + _NUMPY in head else ""
    return SUFFIXES.get(os.path.splitext(path)[1].lower(), of_text)


def _begins_with_npy(head: bytes) -> bool:
    """Whether the first file of a zip file is an array; others zip files too."""
    return head[30 : 30 + int.from_bytes(head[26:28], "little")].endswith(b".npy")


def _of_folder(path: str) -> str:
    return (_of_arrays(path) or _of_shards(path)) if os.path.isdir(path) else ""


def _of_arrays(path: str) -> str:
    steps = (
        f.path for f in os.scandir(path) if f.is_dir() and re.search(r"\d", f.name)
    )
    folders = [path, *steps]
    if any(os.path.exists(f"{f}/{name}") for f in folders for name in _ORBAX):
        return "orbax"
    if any(os.path.exists(f"{path}/{name}") for name in _JAX) or _is_of_levanter(path):
        return "jax_arrays"
    return ""


def _is_of_levanter(directory: str) -> bool:
    """Whether it is a step of Levanter that has a folder for each array."""
    metadata = f"{directory}/metadata.json"
    if not os.path.isfile(metadata):
        return False
    with reading(metadata) as f:
        is_step = _LEVANTER.match(f.read(64)) is not None
    return is_step and any(not _ARRAY.isdisjoint(n) for _, _, n in os.walk(directory))


def _of_shards(path: str) -> str:
    return format_of_folder(os.listdir(path))


def format_of_folder(names: Iterable[str]) -> str:
    """The function that opens a folder of files with these names, or `''`."""
    has_shards = any(name.endswith((".safetensors", _INDEX)) for name in names)
    return "safetensors" if has_shards else ""


def _explained(format: str, path: str) -> str:
    """A sentence about what is at a path: how to open it."""
    if not format:
        return ""
    words = _WORDS["npy" if _is_npy(path) else format]
    like = ", like" if format == "eqx" else ""
    opened = f"eqx_ckpt.interop.open_{format}({path!r}{like})"
    return f"{words}: pass `{opened}` in place of the path."


def _file(path: str) -> str:
    explained = _explained(_of_file(path), path)
    return explained or (
        "It is a file, and a checkpoint is a directory. Its format is not known here."
    )


def _orbax(path: str) -> str:
    return _explained(_of_arrays(path), path)


def _holds(path: str) -> str:
    names = sorted(os.listdir(path))
    steps = [name for name in names if has_manifest(f"{path}/{name}")]
    if steps:
        more = ", ..." if len(steps) > _MOST_SHOWN else ""
        shown = ", ".join(map(repr, steps[:_MOST_SHOWN])) + more
        return (
            f"It holds the checkpoints {shown}: pass one of them, or restore the "
            "newest step with a `CheckpointManager`."
        )
    for name in names[:_MOST_TRIED]:
        if format := format_at(f"{path}/{name}"):
            return f"It holds {name!r}. {_explained(format, f'{path}/{name}')}"
    return f"It holds {names[0]!r}, and no checkpoint." if names else "It is empty."
