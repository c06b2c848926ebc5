"""Every way to look into a checkpoint, tried one after the other in a child."""

import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import jax

import eqx_ckpt

from . import workloads
from .zygote import Zygote


MEMORY = 3 * 2**30  # bytes of address space
TIMEOUT = 40  # seconds


def read_in_child(zygote: Zygote, path: pathlib.Path, *names: str) -> dict[str, str]:
    """`read_each_way` in a child with limits; no answer may be "BAD"."""
    args = (read_each_way, str(path), *names)
    outcome = zygote.run(*args, memory=MEMORY, timeout=TIMEOUT)
    assert not outcome.signal, f"dead by signal {outcome.signal}"
    assert outcome.error is None, repr(outcome.error)
    bad = {k: v for k, v in outcome.value.items() if v.startswith("BAD")}
    assert not bad, "\n".join(f"{reader}: {answer}" for reader, answer in bad.items())
    return outcome.value


def read_each_way(path: str, *names: str) -> dict[str, str]:
    """What each reader says: "" or an error's type; and "BAD: ..." if it has no type.

    `names`: only of these readers.
    """
    readers: dict[str, Callable[[], Any]] = {
        "read_manifest": lambda: _shown(eqx_ckpt.inspect.read_manifest(path)),
        "tree_like": lambda: eqx_ckpt.tree_like(path),
        "match": lambda: _shown(eqx_ckpt.tree_match(path, workloads.tree(0))),
        "match itself": lambda: _shown(
            eqx_ckpt.tree_match(path, eqx_ckpt.tree_like(path)),
        ),
        "match on a mesh": lambda: _shown(
            eqx_ckpt.tree_match(
                path, workloads.tree(0), sharding=jax.make_mesh((1,), ("data",))
            )
        ),
        "verify": lambda: eqx_ckpt.inspect.verify(path),
        "restore": lambda: eqx_ckpt.tree_deserialise_leaves(path, workloads.tree(0)),
        "restore a part": lambda: eqx_ckpt.tree_deserialise_leaves(
            path, workloads.tree(0)["layer"], prefix="layer"
        ),
        "restore itself": lambda: eqx_ckpt.tree_deserialise_leaves(
            path, eqx_ckpt.tree_like(path)
        ),
    }
    return {name: _answer(readers[name]) for name in names or readers}


def read_all_ways(path: str, manifests: list[bytes], progress: str) -> dict[int, str]:
    """The manifests to which a reader of the checkpoint at `path` says "BAD"."""
    bad: dict[int, str] = {}
    for i, manifest in enumerate(manifests):
        pathlib.Path(progress).write_text(str(i))
        pathlib.Path(path, "zarr.json").write_bytes(manifest)
        answers = {
            "read_manifest": _answer(lambda: eqx_ckpt.inspect.read_manifest(path))
        }
        if not answers["read_manifest"]:
            answers = read_each_way(path)
        for reader, answer in answers.items():
            if answer.startswith("BAD"):
                bad[i] = f"{reader}: {answer}"
    return bad


def _answer(reader: Callable[[], Any]) -> str:
    try:
        reader()
    except (eqx_ckpt.CheckpointError, OSError) as e:
        return type(e).__name__
    except BaseException as e:
        return f"BAD: {''.join(traceback.format_exception(e)[-3:])}"
    return ""


def _shown(found: Any) -> None:
    assert isinstance(f"{found} {found!r}", str)
