"""What else a path may hold than a checkpoint of this package, and how to open it."""

import os
import re

from .._format.manifest import MANIFEST
from .._format.parse import HEAD, HEAD_BYTES
from .._format.recorded import RECORD


_ORBAX = ("_CHECKPOINT_METADATA", "_METADATA")
_JAX = ("manifest.ocdbt", "pytreedef.json")
_MOST_SHOWN = 5


def what_is_at(path: str) -> str:
    """A sentence about a path that is not a checkpoint, or nothing."""
    try:
        return _around(path) or (
            _file(path) if os.path.isfile(path) else _orbax(path) or _holds(path)
        )
    except OSError:
        return ""


def instead_of_a_run(path: str) -> str:
    """A sentence, if a directory is something else and so cannot be a run."""
    if not os.path.isdir(path):
        return ""
    if _is_ours(path):
        return "It is one checkpoint, and no run: pass the directory that it is in."
    try:
        return _around(path) or _orbax(path)
    except OSError:
        return ""


def _is_ours(directory: str) -> bool:
    try:
        with open(f"{directory}/{MANIFEST}", "rb") as f:
            return HEAD.match(f.read(HEAD_BYTES)) is not None
    except OSError:
        return False


def _around(path: str) -> str:
    """A sentence, if the path is inside a checkpoint."""
    parent, name = os.path.split(path)
    while name:
        if _is_ours(parent):
            inside = os.path.relpath(path, parent)
            part = os.path.dirname(inside) if os.path.isfile(path) else inside
            prefix = f" and `prefix={part!r}`" if part else ""
            return f"It is inside of the checkpoint {parent!r}: pass that{prefix}."
        if os.path.isfile(f"{parent}/{RECORD}") and not _is_ours(path):
            return f"It is inside of the recording {parent!r}: pass that."
        parent, name = os.path.split(parent)
    return ""


def _file(path: str) -> str:
    with open(path, "rb") as f:
        head = f.read(9)
    if head.startswith(b"\x93NUMPY"):
        opened = f"eqx_ckpt.interop.eqx({path!r}, like)"
        return f"It is a file of Equinox: pass `{opened}` in place of the path."
    if head.startswith(b"PK"):
        opened = f"eqx_ckpt.interop.npz({path!r})"
        return f"It seems to be an archive of NumPy: pass `{opened}`."
    if head[8:] == b"{" and int.from_bytes(head[:8], "little") < os.stat(path).st_size:
        opened = f"eqx_ckpt.interop.safetensors({path!r})"
        return f"It is a file of safetensors: pass `{opened}` in place of the path."
    if path.endswith(".msgpack"):
        opened = f"eqx_ckpt.interop.flax({path!r})"
        return f"It seems to be msgpack of flax: pass `{opened}`."
    return "It is a file, and a checkpoint is a directory."


def _orbax(path: str) -> str:
    steps = (
        f.path for f in os.scandir(path) if f.is_dir() and re.search(r"\d", f.name)
    )
    folders = [path, *steps]
    if any(os.path.exists(f"{f}/{name}") for f in folders for name in _ORBAX):
        opened = f"eqx_ckpt.interop.orbax({path!r})"
        return f"It is of Orbax: pass `{opened}` in place of the path."
    if any(os.path.exists(f"{path}/{name}") for name in _JAX):
        opened = f"eqx_ckpt.interop.jax_arrays({path!r})"
        return f"It seems to have arrays of JAX or Levanter: pass `{opened}`."
    return ""


def _holds(path: str) -> str:
    names = sorted(os.listdir(path))
    steps = [name for name in names if _is_ours(f"{path}/{name}")]
    if steps:
        more = ", ..." if len(steps) > _MOST_SHOWN else ""
        shown = ", ".join(map(repr, steps[:_MOST_SHOWN])) + more
        return (
            f"It holds the checkpoints {shown}: pass one of them, or restore the "
            "newest step with a `CheckpointManager`."
        )
    for name in names:
        if name.endswith((".eqx", ".safetensors")):
            return f"It holds {name!r}. {_file(f'{path}/{name}')}"
    return ""
