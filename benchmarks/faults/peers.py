"""How each library keeps the checkpoints of a training run, as its users do it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


# The one step that is listed where a single file is overwritten by every save.
ONE_FILE = -1

Arrays = dict[str, Any]


class Run(NamedTuple):
    """The checkpoints of one directory. `save` returns when the save is acknowledged.

    For a library that saves in the background, that is when waiting for it has ended.
    """

    save: Callable[[int, Arrays], None]
    steps: Callable[[], list[int]]
    restore: Callable[[int, Arrays], Arrays]
    close: Callable[[], None]


def ours(directory: Path, keep: int) -> Run:
    import eqx_ckpt

    keep_last = eqx_ckpt.keep_last(keep)
    manager = eqx_ckpt.CheckpointManager(directory, keep=keep_last)

    def save(step: int, tree: Arrays) -> None:
        manager.save(step, tree).result()

    def restore(step: int, like: Arrays) -> Arrays:
        return manager.restore(like, step)

    return Run(save, manager.steps, restore, manager.close)


def orbax(directory: Path, keep: int, *, background: bool = True) -> Run:
    """`CheckpointManager` with its usual options, beside `max_to_keep`."""
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=background
    )
    manager = ocp.CheckpointManager(directory, options=options)

    def save(step: int, tree: Arrays) -> None:
        if not manager.save(step, args=ocp.args.StandardSave(tree)):
            raise FileExistsError("`save` returned False")
        manager.wait_until_finished()

    def restore(step: int, like: Arrays) -> Arrays:
        return manager.restore(step, args=ocp.args.StandardRestore(like))

    def steps() -> list[int]:
        return list(manager.all_steps(read=True))

    return Run(save, steps, restore, manager.close)


def orbax_sync(directory: Path, keep: int) -> Run:
    return orbax(directory, keep, background=False)


def equinox(directory: Path, keep: int) -> Run:
    """One file, which every step overwrites."""
    import equinox as eqx

    file = directory / "checkpoint.eqx"

    def save(step: int, tree: Arrays) -> None:
        eqx.tree_serialise_leaves(file, tree)

    def steps() -> list[int]:
        return [ONE_FILE] if file.exists() else []

    def restore(step: int, like: Arrays) -> Arrays:
        return eqx.tree_deserialise_leaves(file, like)

    return Run(save, steps, restore, _nothing)


def flax(directory: Path, keep: int) -> Run:
    """`save_checkpoint` with its defaults, with which it writes by means of Orbax."""
    from flax.training import checkpoints

    def save(step: int, tree: Arrays) -> None:
        checkpoints.save_checkpoint(directory, tree, step, keep=keep)

    def steps() -> list[int]:
        return [int(step) for step in checkpoints.available_steps(directory)]

    def restore(step: int, like: Arrays) -> Arrays:
        return checkpoints.restore_checkpoint(directory, like, step)

    return Run(save, steps, restore, _nothing)


def safetensors(directory: Path, keep: int) -> Run:
    """`save_file` straight to a file for each step; the user lists and deletes them.

    Deleting is left out: it would be this script's code that is tested.
    """
    from safetensors.flax import load_file, save_file

    def file(step: int) -> Path:
        return directory / f"step-{step}.safetensors"

    def save(step: int, tree: Arrays) -> None:
        save_file(tree, file(step))

    def steps() -> list[int]:
        files = directory.glob("step-*.safetensors")
        return sorted(int(f.stem.removeprefix("step-")) for f in files)

    def restore(step: int, like: Arrays) -> Arrays:
        return load_file(file(step))

    return Run(save, steps, restore, _nothing)


def _nothing() -> None:
    pass


PEERS: dict[str, Callable[[Path, int], Run]] = {
    "eqx_ckpt": ours,
    "orbax": orbax,
    "orbax-sync": orbax_sync,
    "equinox": equinox,
    "flax": flax,
    "safetensors": safetensors,
}
# Those that delete old checkpoints by themselves.
RETAINING = {"eqx_ckpt", "orbax", "orbax-sync", "flax"}
