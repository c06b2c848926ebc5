"""The libraries that are compared: how each one saves and restores a tree.

A peer is opened before anything is timed: its imports, and what a training script
would make once, cost nothing here. Those that flush nothing to the disk are followed by
`os.sync`, so that every save is durable.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

from .workloads import named, nested


class Peer(NamedTuple):
    """How a library saves and restores.

    `adapt` brings a tree, or a skeleton, into the form that the library takes, before
    anything is timed. `restore_part` gets a skeleton that lacks some of the leaves.
    `start` begins a save, and returns what waits for its end.
    """

    adapt: Callable[[PyTree], Any]
    save: Callable[[Path, Any], None]
    restore: Callable[[Path, Any], Any]
    restore_part: Callable[[Path, Any], Any] | None
    start: Callable[[Path, Any], Callable[[], Any]] | None = None


def _same(tree: PyTree) -> PyTree:
    return tree


def ours() -> Peer:
    import tensorstore  # noqa: F401

    import eqx_ckpt

    def restore_part(path: Path, like: Any) -> Any:
        return {
            key: eqx_ckpt.tree_deserialise_leaves(path, part, prefix=key)
            for key, part in like.items()
        }

    def start(path: Path, tree: PyTree) -> Callable[[], None]:
        return eqx_ckpt.tree_serialise_leaves_async(path, tree).result

    return Peer(
        _same,
        eqx_ckpt.tree_serialise_leaves,
        eqx_ckpt.tree_deserialise_leaves,
        restore_part,
        start,
    )


def equinox() -> Peer:
    import equinox as eqx

    def save(path: Path, tree: PyTree) -> None:
        path.mkdir()
        eqx.tree_serialise_leaves(path / "tree.eqx", tree)
        os.sync()

    def restore(path: Path, like: PyTree) -> PyTree:
        return eqx.tree_deserialise_leaves(path / "tree.eqx", like)

    return Peer(_same, save, restore, None)


def safetensors() -> Peer:
    from safetensors import safe_open
    from safetensors.flax import load_file, save_file

    def save(path: Path, arrays: dict[str, jax.Array]) -> None:
        path.mkdir()
        save_file(arrays, path / "tree.safetensors")
        os.sync()

    def restore(path: Path, like: Any) -> dict[str, jax.Array]:
        return load_file(path / "tree.safetensors")

    def restore_part(path: Path, like: dict[str, Any]) -> dict[str, jax.Array]:
        with safe_open(path / "tree.safetensors", framework="flax") as f:
            return {name: f.get_tensor(name) for name in like}

    return Peer(named, save, restore, restore_part)


def flax() -> Peer:
    from flax.serialization import msgpack_restore, to_bytes

    def save(path: Path, tree: Any) -> None:
        path.mkdir()
        (path / "tree.msgpack").write_bytes(to_bytes(tree))
        os.sync()

    def restore(path: Path, like: Any) -> Any:
        data = (path / "tree.msgpack").read_bytes()
        return jax.device_put(msgpack_restore(data))

    return Peer(nested, save, restore, None)


def _orbax(*, use_ocdbt: bool) -> Peer:
    import orbax.checkpoint as ocp

    checkpointer = ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)
    )

    def start(path: Path, tree: Any) -> Callable[[], None]:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree))
        return checkpointer.wait_until_finished

    def save(path: Path, tree: Any) -> None:
        start(path, tree)()

    def restore(path: Path, like: Any, *, part: bool = False) -> Any:
        like = jtu.tree_map(_placed, like)
        args = ocp.args.PyTreeRestore(
            like,
            restore_args=ocp.checkpoint_utils.construct_restore_args(like),
            partial_restore=part,
        )
        return checkpointer.restore(path, args=args)

    def restore_part(path: Path, like: Any) -> Any:
        return restore(path, like, part=True)

    return Peer(nested, save, restore, restore_part, start)


def orbax() -> Peer:
    return _orbax(use_ocdbt=True)


def orbax_files() -> Peer:
    return _orbax(use_ocdbt=False)


def orbax_v1() -> Peer:
    import orbax.checkpoint.experimental.v1 as ocp

    loading = ocp.options.PyTreeOptions.Loading(partial_load=True)
    options = ocp.options.PyTreeOptions(loading=loading)

    def restore(path: Path, like: Any) -> Any:
        return ocp.load_pytree(path, jtu.tree_map(_placed, like))

    def restore_part(path: Path, like: Any) -> Any:
        with ocp.Context(pytree_options=options):
            return restore(path, like)

    def start(path: Path, tree: Any) -> Callable[[], None]:
        return ocp.save_pytree_async(path, tree).result

    return Peer(nested, ocp.save_pytree, restore, restore_part, start)


def _placed(struct: Any) -> jax.ShapeDtypeStruct:
    sharding = struct.sharding or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)


def jax_manager() -> Peer:
    """What JAX brings along itself, with one directory of files for each array."""
    from jax.experimental.array_serialization.serialization import (
        get_tensorstore_spec,
        GlobalAsyncCheckpointManager,
    )

    manager = GlobalAsyncCheckpointManager()

    def specs(path: Path, names: Any) -> list[dict[str, Any]]:
        return [get_tensorstore_spec(f"{path}/{n}", ocdbt=False) for n in names]

    def start(path: Path, arrays: dict[str, jax.Array]) -> Callable[[], None]:
        manager.serialize(
            list(arrays.values()),
            specs(path, arrays),
            on_commit_callback=lambda: None,
        )
        return manager.wait_until_finished

    def save(path: Path, arrays: dict[str, jax.Array]) -> None:
        start(path, arrays)()

    def restore(path: Path, like: dict[str, Any]) -> dict[str, jax.Array]:
        arrays = manager.deserialize(
            [_placed(struct).sharding for struct in like.values()],
            specs(path, like),
            [struct.shape for struct in like.values()],
            [struct.dtype for struct in like.values()],
        )
        return dict(zip(like, arrays, strict=True))

    return Peer(named, save, restore, restore, start)


def plain_files() -> Peer:
    """The bytes of each leaf in a file of its own: what any such layout has to cost."""

    def save(path: Path, arrays: dict[str, jax.Array]) -> None:
        path.mkdir()
        for i, array in enumerate(arrays.values()):
            with open(path / str(i), "wb", buffering=0) as f:
                _write(f.fileno(), array)
        os.sync()

    def restore(path: Path, like: dict[str, Any]) -> dict[str, jax.Array]:
        buffers = _buffers(like)
        for i, buffer in enumerate(buffers):
            fd = os.open(path / str(i), os.O_RDONLY)
            _read(fd, buffer)
            os.close(fd)
        return dict(zip(like, jax.device_put(buffers), strict=True))

    return Peer(named, save, restore, None)


def limit() -> Peer:
    """The same bytes in one file: `write` and `fsync`, `read` into fresh memory."""

    def save(path: Path, arrays: dict[str, jax.Array]) -> None:
        path.mkdir()
        with open(path / "all", "wb", buffering=0) as f:
            for array in arrays.values():
                _write(f.fileno(), array)
            os.fsync(f.fileno())

    def restore(path: Path, like: dict[str, Any]) -> dict[str, np.ndarray]:
        buffers = _buffers(like)
        fd = os.open(path / "all", os.O_RDONLY)
        for buffer in buffers:
            _read(fd, buffer)
        os.close(fd)
        return dict(zip(like, buffers, strict=True))

    return Peer(named, save, restore, None)


def _write(fd: int, array: jax.Array) -> None:
    rest = memoryview(np.asarray(array).reshape(-1).view(np.uint8))
    while rest:
        rest = rest[os.write(fd, rest) :]


def _read(fd: int, array: np.ndarray) -> None:
    rest = memoryview(array.reshape(-1).view(np.uint8))
    while rest:
        count = os.readv(fd, [rest])
        if not count:
            raise ValueError("the file is too short")
        rest = rest[count:]


def _buffers(like: dict[str, Any]) -> list[np.ndarray]:
    """Fresh memory in huge pages, aligned so that `jax.device_put` does not copy it."""
    sizes = [int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in like.values()]
    starts = np.cumsum([0] + [-(-size // 64) * 64 for size in sizes])
    memory = mmap.mmap(-1, max(int(starts[-1]), 1), mmap.MAP_PRIVATE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    return [
        whole[start : start + size].view(x.dtype).reshape(x.shape)
        for x, start, size in zip(like.values(), starts, sizes, strict=False)
    ]


PEERS: dict[str, Callable[[], Peer]] = {
    "eqx_ckpt": ours,
    "equinox": equinox,
    "safetensors": safetensors,
    "flax": flax,
    "orbax": orbax,
    "orbax-files": orbax_files,
    "orbax-v1": orbax_v1,
    "jax": jax_manager,
    "plain-files": plain_files,
    "limit": limit,
}
