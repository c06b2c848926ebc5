"""What else a path may hold than a checkpoint of this package, and how to open it."""

import os
import re

from .._format.recorded import RECORD
from .opening import reading
from .replacing import has_manifest, whole_above


_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA")
_JAX = ("manifest.ocdbt", "pytreedef.json")
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
ONE_CHECKPOINT = "It is one checkpoint, and no run: pass the directory that it is in."
_WORDS = {
    "eqx": "It is a file of Equinox",
    "flax": "It seems to be msgpack of flax",
    "jax_arrays": "It seems to have arrays of JAX or Levanter",
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
        # Equinox adds it.
        file = f"{path}.eqx"
        return f"There is {file!r}. {_file(file)}" if os.path.isfile(file) else ""
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
        return "It is a recording, and no run."
    try:
        return _around(path) or _orbax(path)
    except OSError:
        return ""


def _around(path: str) -> str:
    """A sentence, if the path is inside a checkpoint."""
    what, above = whole_above(path)
    if what == "checkpoint":
        inside = os.path.relpath(path, above)
        part = os.path.dirname(inside) if os.path.isfile(path) else inside
        prefix = f" and `prefix={part!r}`" if part else ""
        return f"It is inside of the checkpoint {above!r}: pass that{prefix}."
    if what == "recording" and not has_manifest(path):
        return f"It is inside of the recording {above!r}: pass that."
    return ""


def format_at(path: str) -> str:
    """The function of `eqx_ckpt.interop` that opens what is at a path, or `''`."""
    return _of_file(path) if os.path.isfile(path) else _of_folder(path)


def _of_file(path: str) -> str:
    with reading(path) as f:
        head = f.read(_HEAD_BYTES)
    if head.startswith(_NUMPY):
        return "eqx"
    if head.startswith(b"PK"):
        return "npz"
    is_header = head[8:9] == b"{"
    if is_header and int.from_bytes(head[:8], "little") < os.stat(path).st_size:
        return "safetensors"
    if path.endswith(_INDEX):
        return "safetensors"
    of_text = "eqx" if b"\n" + _NUMPY in head else ""
    return SUFFIXES.get(os.path.splitext(path)[1].lower(), of_text)


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
    suffixes = (".safetensors", _INDEX)
    has_shards = any(name.endswith(suffixes) for name in os.listdir(path))
    return "safetensors" if has_shards else ""


def _explained(format: str, path: str) -> str:
    """A sentence about what is at a path: how to open it."""
    if not format:
        return ""
    like = ", like" if format == "eqx" else ""
    opened = f"eqx_ckpt.interop.{format}({path!r}{like})"
    return f"{_WORDS[format]}: pass `{opened}` in place of the path."


def _file(path: str) -> str:
    explained = _explained(_of_file(path), path)
    return explained or "It is a file, and a checkpoint is a directory."


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
    for name in names:
        if name.endswith((".eqx", ".safetensors")) and os.path.isfile(f"{path}/{name}"):
            return f"It holds {name!r}. {_file(f'{path}/{name}')}"
    return ""
