"""What the processes of a job do in the tests; each function runs in all of them."""

import functools as ft
import hashlib
import pathlib
import socket
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding

import eqx_ckpt
from manager.looking import as_on, looked_at
from support import chunk_files, ChunkFiles, JointAttempt


# Which axes of the mesh (x=4, y=2) each leaf is sharded over.
SPECS = {
    "both": P("x", "y"),
    "rows": P("x"),
    "columns": P(None, "y"),
    "one_axis": P(("x", "y")),
    "nowhere": P(),
    "bfloat16": P("y"),
    "weak": P("x"),
    "bits": P("x"),
    "keys": P("y"),
    "same_keys": P(),
}
TIMEOUT = 40.0  # seconds; longer than anything here takes
SPREAD_BYTES = 2**25


def value(name: str) -> np.ndarray:
    """The data of a leaf; of a key, its key data."""
    if name.endswith("keys"):
        return np.arange(16, dtype=np.uint32).reshape(8, 2)
    if name == "weak":
        return np.full(8, 2.5, np.float32)
    if name == "bits":
        # -0.0, denormals, infinities and NaNs with payloads: sums would change them.
        bits = [0x80000000, 1, 0x807FFFFF, 0x7F800000, 0x7FC00001, 0xFFC12345]
        return np.tile(np.array(bits, np.uint32), (8, 1)).view(np.float32)
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else np.float32
    seed = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 1000
    return (np.arange(16 * 12).reshape(16, 12) + seed).astype(dtype)


def mesh(x: int = 4, y: int = 2, *, first: str = "x") -> Mesh:
    """All devices; with `first="y"`, the axes are transposed."""
    devices = np.array(jax.devices())
    if first == "y":
        return Mesh(devices.reshape(y, x), ("y", "x"))
    return Mesh(devices.reshape(x, y), ("x", "y"))


def shared(data: np.ndarray, sharding: Sharding) -> jax.Array:
    """An array of all processes."""
    return jax.make_array_from_callback(
        data.shape, sharding, lambda index: data[index], dtype=data.dtype
    )


def leaf(name: str, sharding: Sharding | None) -> Any:
    """A leaf of the tree with the sharding; `None`: on one device."""
    data = value(name)
    if name == "weak":
        fill = ft.partial(jnp.full, data.shape, 2.5)
        return jax.jit(fill, out_shardings=sharding)()
    array = jnp.asarray(data) if sharding is None else shared(data, sharding)
    return jax.random.wrap_key_data(array) if name.endswith("keys") else array


def tree(on: Mesh | None, specs: dict[str, P] = SPECS) -> dict[str, Any]:
    """Leaves of every kind."""
    every = {
        name: leaf(name, None if on is None else NamedSharding(on, spec))
        for name, spec in specs.items()
    }
    return {"shared": every, "local": local()} | some(on is not None)


def local() -> dict[str, Any]:
    """Leaves that each process has for itself."""
    return {
        "array": jnp.arange(5.0),
        "key": jax.random.key(3),
        "scalar": jnp.asarray(2.0),
        "numpy": np.arange(6.0).reshape(2, 3),
        "numpy_scalar": np.float32(1.5),
        "bool": True,
        "int": 7,
        "float": 0.1,
        "complex": 1j,
    }


def some(sharded: bool) -> dict[str, Any]:
    """Leaves on some of the devices: of two processes, of process 0, of the last."""
    on_four, on_two, on_last = None, None, None
    if sharded:
        on_four = NamedSharding(Mesh(np.array(jax.devices()[2:6]), "x"), P("x"))
        on_two = NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), P("x"))
        on_last = NamedSharding(Mesh(np.array(jax.devices()[-2:]), "x"), P("x"))
    shardings = {"four": on_four, "two": on_two, "last": on_last}
    return {name: leaf(name, sharding) for name, sharding in shardings.items()}


def pieces(array: Any) -> list[Any]:
    """What can be seen of a leaf in this process, to the bit."""
    if not isinstance(array, jax.Array):
        return [type(array), np.asarray(array).dtype, np.asarray(array).tobytes()]
    weak, dtype = getattr(array, "weak_type", False), str(array.dtype)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    shards = [
        (str(shard.device), str(shard.index), np.asarray(shard.data).tobytes())
        for shard in array.addressable_shards
    ]
    return [dtype, array.shape, weak, sorted(shards)]


def assert_same(found: Any, expected: Any) -> None:
    """The same leaves, with the same shards on the same devices."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    leaves = jax.tree.leaves_with_path(expected)
    for (path, x), y in zip(leaves, jax.tree.leaves(found), strict=True):
        assert pieces(y) == pieces(x), jax.tree_util.keystr(path)


def save(
    path: str, asynchronous: bool = False, layout: eqx_ckpt.typing.Layout = "zarr"
) -> None:
    saved, options = tree(mesh()), {"layout": layout, "timeout": TIMEOUT}
    if asynchronous:
        saving = eqx_ckpt.tree_serialise_leaves_async(path, saved, **options)
        return saving.result()
    return eqx_ckpt.tree_serialise_leaves(path, saved, **options)


def restore(path: str, *, transposed: bool = False) -> None:
    """Restore it onto the devices of this job, as `like` says."""
    like = tree(mesh(first="y" if transposed else "x"))
    assert_same(eqx_ckpt.tree_deserialise_leaves(path, like), like)


def restore_by_mesh(path: str) -> None:
    """Restore the shared leaves as they were sharded, on a mesh with other sizes."""
    other = mesh(2, 4)
    # The sizes of this mesh do not divide every leaf that it shards.
    expected = tree(other)["shared"]
    found = eqx_ckpt.tree_deserialise_leaves(
        path, eqx_ckpt.tree_like(path, prefix="shared"), prefix="shared", sharding=other
    )
    assert_same(found, expected)


def restore_on_one_device(path: str) -> None:
    like = tree(None)
    assert_same(eqx_ckpt.tree_deserialise_leaves(path, like), like)
    eqx_ckpt.inspect.verify(path)


def save_and_restore(path: str, layout: eqx_ckpt.typing.Layout = "zarr") -> None:
    """In one job: save, and restore as it was, transposed, and by a mesh."""
    save(path, layout=layout)
    eqx_ckpt.inspect.verify(path)
    restore(path)
    restore(path, transposed=True)
    restore_by_mesh(path)
    like = tree(mesh())
    found = eqx_ckpt.tree_deserialise_leaves(path, like, broadcast_replicas=True)
    assert_same(found, like)
    restore_on_some(path)
    save(path + "-async", asynchronous=True, layout=layout)


def restore_on_some(path: str) -> None:
    """Restore onto a mesh that leaves out the last process, if there are several."""
    half = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    like = {"both": leaf("both", NamedSharding(half, P("x")))}
    for broadcast_replicas in (False, True):
        found = eqx_ckpt.tree_deserialise_leaves(
            path,
            like,
            where=lambda tree: tree["both"],
            prefix="shared",
            broadcast_replicas=broadcast_replicas,
        )
        assert_same(found, like)


def alone(path: str) -> None:
    """As a program that begins a job in any case, of however many processes."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as reserved:
        address = "{}:{}".format(*reserved.getsockname())
    jax.distributed.initialize(address, 1, 0, coordinator_bind_address=address)
    save_and_restore(path)


def restore_anywhere(path: str) -> None:
    restore(path)
    restore(path, transposed=True)
    restore_by_mesh(path)


def hidden(directory: str) -> list[str]:
    """What saves have left over."""
    entries = pathlib.Path(directory).iterdir()
    return sorted(entry.name for entry in entries if entry.name.startswith("."))


# Who writes and who reads what.


def spy_on_writes() -> list[tuple[str, str, int]]:
    """From now on, of each piece that this process writes: leaf, region, bytes."""
    seen: list[tuple[str, str, int]] = []
    write = ChunkFiles.write

    def watched(pieces: Iterable[Any]) -> Iterator[Any]:
        for piece in pieces:
            seen.append((piece.name, str(piece.region), piece.array.nbytes))
            yield piece

    def spy(chunks: Any, arrays: Any, pieces: Any, *args: Any, **kwargs: Any) -> Any:
        return write(chunks, arrays, watched(pieces), *args, **kwargs)

    ChunkFiles.write = spy
    return seen


def spy_on_reads() -> list[int]:
    """From now on, the bytes of each chunk that this process reads."""
    seen: list[int] = []
    enter = chunk_files.File.__enter__

    def spy(file: chunk_files.File) -> None:
        enter(file)
        seen.append(file._chunk.nbytes)

    chunk_files.File.__enter__ = spy
    return seen


class Spread(NamedTuple):
    """What one process did: the pieces that it wrote, and bytes."""

    pieces: list[tuple[str, str, int]]
    written: int
    read: int
    needed: int


def spread(path: str, layout: eqx_ckpt.typing.Layout = "zarr") -> Spread:
    """Save large arrays, and restore those that are sharded."""
    data = np.arange(SPREAD_BYTES // 4, dtype=np.float32).reshape(16, 512, 1024)
    specs = {"sharded": P("x", "y"), "partly": P("y"), "everywhere": P()}
    saved = {n: shared(data, NamedSharding(mesh(), s)) for n, s in specs.items()}
    seen, before = spy_on_writes(), _written()
    save = ft.partial(eqx_ckpt.tree_serialise_leaves, layout=layout, timeout=TIMEOUT)
    save(path, saved)
    written = _written() - before
    read = spy_on_reads()
    found = eqx_ckpt.tree_deserialise_leaves(path, saved, where=lambda t: t["sharded"])
    assert_same(found["sharded"], saved["sharded"])
    needed = sum(shard.data.nbytes for shard in saved["sharded"].addressable_shards)
    return Spread(seen, written, sum(read), needed)


def save_a_nan(run: str) -> tuple[str, list[int]]:
    """What each process hears of a NaN that only one of them has; the steps then."""
    data = np.ones((16, 8), np.float32)
    data[0, 0] = np.nan
    array = shared(data, NamedSharding(mesh(), P("x", "y")))
    manager = eqx_ckpt.CheckpointManager(run, check_finite=True, timeout=TIMEOUT)
    error = manager.save(1, {"w": array}).exception()
    return str(error), manager.steps()


def save_incrementally(run: str, **how: Any) -> list[set[str]]:
    """Save three steps: an array changes in the second, the sharding in the third.

    Return which arrays each save has copied to the host, as on accelerators.
    """
    if how:
        run = f"{run}/{jax.process_index()}"
    data = np.arange(128, dtype=np.float32).reshape(16, 8)
    rows, columns = (NamedSharding(mesh(), P(*axes)) for axes in ("x", (None, "x")))
    everywhere, keys = NamedSharding(mesh(), P()), np.arange(8, dtype=np.uint32)
    objects = {"object": shared(data, rows), "copies": shared(data, everywhere)}

    def tree(other: int, sharding: Sharding) -> dict[str, Any]:
        data_of_keys = shared(keys.reshape(4, 2), rows)
        return {
            **objects,
            "same": shared(data, sharding),
            "other": shared(data + other, rows),
            "keys": jax.random.wrap_key_data(data_of_keys),
            "one": jnp.asarray(data),
        }

    steps = [tree(1, rows), tree(2, rows), tree(2, columns)]
    frozen = lambda leaf: leaf is not objects["object"]  # noqa: E731
    how |= {"incremental": True, "frozen": frozen, "timeout": TIMEOUT}
    copied: list[set[str]] = []
    with as_on("accelerator"), eqx_ckpt.CheckpointManager(run, **how) as manager:
        for step, leaves in enumerate(steps, 1):
            copied += [looked_at(manager, step, leaves, "accelerator")]
        for step, leaves in enumerate(steps, 1):
            for name, found in manager.restore(leaves, step).items():
                assert_same(found, leaves[name])
    return copied


def fail_to_begin(run: str) -> tuple[str, list[int]]:
    """Fail to begin a step whose arrays are shared before they are written."""
    rows = NamedSharding(mesh(), P("x"))
    tree = {"w": shared(np.arange(16, dtype=np.float32), rows)}
    how: dict[str, Any] = {"incremental": True, "timeout": TIMEOUT}
    fails = mock.patch.object(JointAttempt, "_begin_first", side_effect=OSError("no"))
    with as_on("accelerator"), eqx_ckpt.CheckpointManager(run, **how) as manager:
        manager.save(1, tree).result()
        try:
            with fails:
                manager.save(2, tree).result()
            text = ""
        except (OSError, eqx_ckpt.CheckpointError) as e:
            text = str(e)
        assert looked_at(manager, 3, tree, "accelerator") == set()
        return text, manager.steps()


def _written() -> int:
    """Bytes that this process has written to files so far."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def audit(run: str) -> list[tuple[int, int | None, tuple[str, ...]]]:
    """Audit a run of which one element went wrong, on a device of the last process."""
    rows = NamedSharding(mesh(), P("x"))
    start = {"same": value("rows"), "w": value("rows")}
    tree = {name: shared(data, rows) for name, data in start.items()}
    found: list[tuple[int, int | None, tuple[str, ...]]] = []
    with eqx_ckpt.CheckpointManager(run, timeout=TIMEOUT) as manager:
        for step in (1, 2, 3):
            data = value("rows") + step
            data[-1, -1] += step == 3
            manager.save(step, {**tree, "w": shared(data, rows)})

        def step_fn(tree: Any, step: int) -> Any:
            return {**tree, "w": shared(value("rows") + step, rows)}

        like = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tree.items()
        }
        for b in (2, 3):
            audit = manager.audit(step_fn, like, 1, b, sharding=rows)
            found.append((audit.since, audit.step, audit.leaves))
    return found
