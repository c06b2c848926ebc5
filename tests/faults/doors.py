"""Every way to look into a checkpoint, tried one after the other in a child."""

import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import eqx_ckpt

from . import workloads
from .zygote import Zygote


MEMORY = 3 * 2**30  # bytes of address space
DEADLINE = 40  # seconds


def knock_in_child(zygote: Zygote, path: pathlib.Path, *names: str) -> dict[str, str]:
    """`knock` in a child that may use `MEMORY` for `DEADLINE`; nothing may be "BAD"."""
    args = (knock, str(path), *names)
    outcome = zygote.run(*args, memory=MEMORY, deadline=DEADLINE)
    assert not outcome.signal, f"dead by signal {outcome.signal}"
    assert outcome.error is None, repr(outcome.error)
    bad = {k: v for k, v in outcome.value.items() if v.startswith("BAD")}
    assert not bad, "\n".join(f"{door}: {answer}" for door, answer in bad.items())
    return outcome.value


def knock(path: str, *names: str) -> dict[str, str]:
    """What each door says: "" or an error's type; and "BAD: ..." if it has no type.

    `names`: only of these doors.
    """
    doors: dict[str, Callable[[], Any]] = {
        "read_manifest": lambda: _shown(eqx_ckpt.read_manifest(path)),
        "tree_like": lambda: eqx_ckpt.tree_like(path),
        "match": lambda: _shown(eqx_ckpt.match(path, workloads.tree(0))),
        "match itself": lambda: _shown(
            eqx_ckpt.match(path, eqx_ckpt.tree_like(path)),
        ),
        "verify": lambda: eqx_ckpt.verify(path),
        "restore": lambda: eqx_ckpt.tree_deserialise_leaves(path, workloads.tree(0)),
        "restore a part": lambda: eqx_ckpt.tree_deserialise_leaves(
            path, workloads.tree(0)["layer"], prefix="layer"
        ),
        "restore itself": lambda: eqx_ckpt.tree_deserialise_leaves(
            path, eqx_ckpt.tree_like(path)
        ),
    }
    return {name: _answer(doors[name]) for name in names or doors}


def knock_all(path: str, manifests: list[bytes], progress: str) -> dict[int, str]:
    """The manifests to which a door of the checkpoint at `path` says "BAD"."""
    bad: dict[int, str] = {}
    for i, manifest in enumerate(manifests):
        pathlib.Path(progress).write_text(str(i))
        pathlib.Path(path, "zarr.json").write_bytes(manifest)
        answers = {"read_manifest": _answer(lambda: eqx_ckpt.read_manifest(path))}
        if not answers["read_manifest"]:
            answers = knock(path)
        for door, answer in answers.items():
            if answer.startswith("BAD"):
                bad[i] = f"{door}: {answer}"
    return bad


def _answer(door: Callable[[], Any]) -> str:
    try:
        door()
    except (eqx_ckpt.CheckpointError, OSError) as e:
        return type(e).__name__
    except BaseException as e:
        return f"BAD: {''.join(traceback.format_exception(e)[-3:])}"
    return ""


def _shown(found: Any) -> None:
    assert isinstance(f"{found} {found!r}", str)
