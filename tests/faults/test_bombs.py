"""Small files that claim to be, or would become, far more than they are.

Each case runs in a child of its own with bounded memory and time, see test_hostile.py.
"""

import json
import os
import pathlib
import struct
from collections.abc import Callable

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import interop
from faults import ocdbt
from faults.manifests import edited
from faults.ocdbt import Place
from faults.readers import MEMORY, TIMEOUT
from faults.zygote import Zygote
from interop.mutations import read_rows


GOOD = {"w/.zarray": ocdbt.ZARRAY, "w/0": np.ones(4, np.float32).tobytes()}


def read(function: str, path: str) -> None:
    """Everything of a file or a directory of another program."""
    for _ in eqx_ckpt.inspect.iter_leaves(getattr(interop, function)(path)):
        pass


def read_zarr(path: str) -> None:
    read_rows(eqx_ckpt.data.StoredDataSource(x=path))


def match(path: str) -> None:
    assert not eqx_ckpt.tree_match(path, {"w": np.zeros(3)}).ok


def refused(
    zygote: Zygote, function: Callable[..., None], *args: str
) -> eqx_ckpt.CheckpointError:
    """The error of a child, which names the last argument."""
    outcome = zygote.run(function, *args, memory=MEMORY, timeout=TIMEOUT)
    assert not outcome.signal, f"dead by signal {outcome.signal}"
    assert isinstance(outcome.error, eqx_ckpt.CheckpointError), repr(outcome.error)
    assert args[-1] in str(outcome.error)
    return outcome.error


def grown(path: pathlib.Path) -> None:
    """The files of a database are as large as it says, and empty."""
    os.truncate(path / ocdbt.FILE, 2**41)


def laughing(levels: int) -> list[bytes]:
    """A thousand children at each level, all of which are the same node."""
    nodes = [ocdbt.leaf({f"/{key[2:]}": value for key, value in GOOD.items()})]
    for level in range(levels):
        start = sum(map(len, nodes[:-1]))
        nodes.append(ocdbt.above(level + 1, 1000 * [Place(start, len(nodes[-1]))]))
    return nodes


def long(count: int, leaves: int = 1) -> list[bytes]:
    """Keys that all begin with 60,000 bytes, which are there once for each leaf."""
    below = ocdbt.leaf({f"/{i:05d}": b"" for i in range(count)})
    places = [Place(i * len(below), len(below)) for i in range(leaves)]
    return [*[below] * leaves, ocdbt.above(1, places, "a" * 60_000)]


# What is written, and whether its file is as large as is said.
DATABASES: dict[str, tuple[Callable[[pathlib.Path], None], str]] = {
    "a chunk of 2**40 bytes": (
        lambda path: ocdbt.write(path, [ocdbt.leaf({**GOOD, "w/0": Place(0, 2**40)})]),
        "w/0 has 1099511627776 bytes",
    ),
    "metadata of 2**40 bytes": (
        lambda path: ocdbt.write(
            path, [ocdbt.leaf({**GOOD, "w/.zarray": Place(0, 2**40)})]
        ),
        "w/.zarray has 1099511627776 bytes",
    ),
    "a node of 2**40 bytes": (
        lambda path: ocdbt.write(path, [ocdbt.leaf(GOOD)], root=Place(0, 2**40)),
        "is too large",
    ),
    "a thousand million keys": (
        lambda path: ocdbt.write(path, laughing(3)),
        "is twice in the database",
    ),
    "keys of 4 GB": (
        lambda path: ocdbt.write(path, long(2**16)),
        "its keys are too long",
    ),
    "keys of 4 GB in many nodes": (
        lambda path: ocdbt.write(path, long(2**12, 16), height=1),
        "the keys of the database are too long",
    ),
    "a value outside": (
        lambda path: ocdbt.write(
            path, [ocdbt.leaf({**GOOD, "w/0": Place(0, 16)}, "../outside")]
        ),
        "is not a place in this database",
    ),
    "a node outside": (
        lambda path: ocdbt.write(path, [ocdbt.leaf(GOOD)], file="../outside"),
        "is not a place in this database",
    ),
}


def test_the_databases_are_right(zygote: Zygote, disk: pathlib.Path) -> None:
    """One that does no harm is read: the others reach what they test."""
    ocdbt.write(disk / "new", [ocdbt.leaf({**GOOD, "x/.zarray": ocdbt.ZARRAY})])
    zygote.call(read, "open_jax_arrays", str(disk / "new"))


@pytest.mark.parametrize("case", DATABASES)
def test_a_database(zygote: Zygote, disk: pathlib.Path, case: str) -> None:
    make, expected = DATABASES[case]
    path = disk / "new"
    make(path)
    (disk / "outside").write_bytes((path / ocdbt.FILE).read_bytes())
    grown(path)
    assert expected in str(refused(zygote, read, "open_jax_arrays", str(path)))
    (path / "_METADATA").write_text(json.dumps({"tree_metadata": ORBAX}))
    assert expected in str(refused(zygote, read, "open_orbax", str(path)))


ORBAX = {
    "('w',)": {
        "key_metadata": [{"key": "w", "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }
}


def test_a_pipe_in_a_database(zygote: Zygote, disk: pathlib.Path) -> None:
    ocdbt.write(disk / "new", [ocdbt.leaf({**GOOD, "w/0": Place(0, 16)}, "pipe")])
    os.mkfifo(disk / "new/pipe")
    refused(zygote, read, "open_jax_arrays", str(disk / "new"))


def test_a_node_of_our_own_database(zygote: Zygote, disk: pathlib.Path) -> None:
    zygote.call(save_database, str(disk / "new"))
    ocdbt.write(disk / "other", [ocdbt.leaf(GOOD)], root=Place(0, 2**40))
    for name in ("manifest.ocdbt", ocdbt.FILE):
        (disk / "other" / name).rename(disk / "new" / name)
    grown(disk / "new")
    refused(zygote, verify, str(disk / "new"))


def save_database(path: str) -> None:
    eqx_ckpt.tree_serialise_leaves(path, {"w": np.zeros(3)}, layout="ocdbt")


def verify(path: str) -> None:
    eqx_ckpt.inspect.verify(path)


def pipe(chunk: pathlib.Path) -> None:
    chunk.unlink()
    os.mkfifo(chunk)


def endless(chunk: pathlib.Path) -> None:
    chunk.unlink()
    chunk.symlink_to("/dev/zero")


def huge(chunk: pathlib.Path) -> None:
    os.truncate(chunk, 2**40)


def metadata(**fields: object) -> Callable[[pathlib.Path], None]:
    def change(chunk: pathlib.Path) -> None:
        content = {**json.loads(ocdbt.ZARRAY), **fields}
        (chunk.parent / ".zarray").write_text(json.dumps(content))

    return change


def long_metadata(chunk: pathlib.Path) -> None:
    (chunk.parent / ".zarray").write_bytes(b"[" + b"1," * 2**21 + b"1]")


@pytest.mark.parametrize(
    "change",
    {
        "a pipe": pipe,
        "an endless device": endless,
        "2**40 bytes": huge,
        "metadata of 4 MiB": long_metadata,
        "a huge chunk": metadata(shape=[2**40], chunks=[2**38]),
        "huge rows": metadata(shape=[4, 2**40, 2**20], chunks=[1, 1, 1]),
    }.items(),
    ids=lambda case: case[0],
)
def test_rows_of_a_zarr_array(
    zygote: Zygote, disk: pathlib.Path, change: tuple[str, Callable]
) -> None:
    path = disk / "x"
    path.mkdir()
    (path / ".zarray").write_bytes(ocdbt.ZARRAY)
    (path / "0").write_bytes(GOOD["w/0"])
    zygote.call(read_zarr, str(path))
    change[1](path / "0")
    refused(zygote, read_zarr, str(path))


def test_rows_of_a_zarr_array_of_links(zygote: Zygote, disk: pathlib.Path) -> None:
    """As a cache of downloads has them."""
    path = disk / "x"
    path.mkdir()
    (disk / "0").write_bytes(GOOD["w/0"])
    (path / ".zarray").write_bytes(ocdbt.ZARRAY)
    (path / "0").symlink_to(disk / "0")
    zygote.call(read_zarr, str(path))


def safetensors(path: pathlib.Path, name: str) -> None:
    entry = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
    header = json.dumps({name: entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"ab")


def test_a_name_of_many_levels(zygote: Zygote, disk: pathlib.Path) -> None:
    """Its folders have 2**39 bytes in all."""
    path = disk / "w.safetensors"
    safetensors(path, ".".join("a" * 2**19))
    refused(zygote, read, "open_safetensors", str(path))


def test_a_leaf_of_many_levels(zygote: Zygote, disk: pathlib.Path) -> None:
    path = disk / "new"
    zygote.call(save_database, str(path))

    def edit(content: dict) -> None:
        keys = ["a"] * 2**19
        record = content["leaves"].pop("w")
        path = [["key", key] for key in keys]
        content["leaves"]["/".join(keys)] = {**record, "path": path}

    manifest = path / "zarr.json"
    manifest.write_bytes(edited(manifest.read_bytes(), edit))
    refused(zygote, match, str(path))


def test_dictionaries_that_nobody_can_take_apart(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    path = disk / "w.safetensors"
    safetensors(path, ".".join("a" * 900))
    outcome = zygote.run(restore_itself, str(path), memory=MEMORY, timeout=TIMEOUT)
    assert isinstance(outcome.error, eqx_ckpt.CheckpointError), repr(outcome)
    assert "in 900 nested dictionaries" in str(outcome.error)


def restore_itself(path: str) -> None:
    source = interop.open_safetensors(path)
    eqx_ckpt.tree_deserialise_leaves(source, eqx_ckpt.tree_like(source))


# Of four million objects, each of which would be a leaf.
@pytest.mark.parametrize("byte", [b"\0", b"\x80", b"\xc0"])
def test_msgpack_of_many_objects(
    zygote: Zygote, disk: pathlib.Path, byte: bytes
) -> None:
    path, count = disk / "w.msgpack", 3_900_000
    path.write_bytes(b"\xdd" + struct.pack(">I", count) + byte * count)
    refused(zygote, read, "open_flax", str(path))
