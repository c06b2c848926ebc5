"""Databases and compressed chunks that this package would not write."""

import pathlib
import random
import re
from collections.abc import Iterator
from typing import Any, TYPE_CHECKING

import jax
import numpy as np
import tensorstore as ts
import xxhash
from fastcrc import crc32
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ckpt
from tests.support import chunk_values, Directory, staging

from . import readers
from .manifests import edited
from .workloads import small_chunks, tree


if TYPE_CHECKING:
    import pytest


_MAGIC = re.compile(rb"\x0c\xdb(?:\x3a\x2a|\x20\xde)")
_RLE = 1
_BLOCK = 2**17  # what one block of zstd may become


def checked(data: bytes) -> bytes:
    """What is written, and its checksum."""
    return data + crc32.iscsi(data).to_bytes(4, "little")


def opened(path: pathlib.Path, **config: Any) -> ts.KvStore:
    base = f"file://{path}/"
    return ts.KvStore.open(
        {"driver": "ocdbt", "base": base, "config": config}, context=ts.Context()
    ).result()


def set_options(
    monkeypatch: "pytest.MonkeyPatch", storage: Any, **options: Any
) -> None:
    """Change how databases are kept in a kind of storage."""
    monkeypatch.setattr(storage, "database", storage.database._replace(**options))


def values_of(path: pathlib.Path) -> dict[bytes, bytes]:
    store = opened(path)
    return {key: store.read(key).result().value for key in store.list().result()}


def inflate(path: pathlib.Path) -> None:
    """Write a database anew without compression, so that each byte has a meaning."""
    values = values_of(path)
    for file in ((path / "manifest.ocdbt"), *(path / "d").iterdir()):
        file.unlink()
    store = opened(path, compression=None)
    with ts.Transaction(atomic=True) as transaction:
        for key, value in values.items():
            store.with_transaction(transaction)[key] = value


def mutants(file: bytes, count: int, first: int = 0) -> Iterator[bytes]:
    """A file of a database: other bytes in one of its records, and a right checksum.

    A record is a magic number, its length, what it says, and its checksum.
    """
    starts = [found.start() for found in re.finditer(_MAGIC, file)]
    for seed in range(first, first + count):
        choices = random.Random(seed)
        start = choices.choice(starts)
        end = start + int.from_bytes(file[start + 4 : start + 12], "little")
        data = bytearray(file[start : end - 4])
        for _ in range(choices.randint(1, 3)):
            place = choices.randrange(12, len(data))
            values = [0, 1, 0x7F, 0x80, 0xFF, choices.randrange(256)]
            data[place] = choices.choice(values)
        yield file[:start] + checked(bytes(data)) + file[end:]


def read_all_ways(
    path: str, file: str, contents: list[bytes], progress: str
) -> list[str]:
    """Put each content into a file, and open some readers: those that say "BAD"."""
    bad: list[str] = []
    for i, content in enumerate(contents):
        pathlib.Path(progress).write_text(str(i))
        pathlib.Path(path, file).write_bytes(content)
        answers = readers.read_each_way(path, "restore", "verify")
        bad += [f"{i}: {a}" for a in answers.values() if a.startswith("BAD")]
    return bad


def zstd(blocks: Iterator[tuple[int, bytes]] | list[tuple[int, bytes]]) -> bytes:
    """A frame of blocks: how long each is, and one byte that it repeats."""
    blocks = list(blocks)
    frame = bytearray(b"\x28\xb5\x2f\xfd\x00\x38")  # magic, no size, window of 128 KiB
    for i, (size, byte) in enumerate(blocks):
        header = size << 3 | _RLE << 1 | (i == len(blocks) - 1)
        frame += header.to_bytes(3, "little") + byte
    return bytes(frame)


def bomb(nbytes: int) -> bytes:
    return zstd([(_BLOCK, b"\0")] * (nbytes // _BLOCK))


def put_chunk(
    path: pathlib.Path, layout: str, name: str, key: str, data: bytes
) -> None:
    """Put the first chunk into a checkpoint, and say in the manifest what it ends with.

    And that its content is 64 zeros.
    """
    value = checked(data)
    if layout == "zarr":
        (path / name / key).write_bytes(value)
    else:
        opened(path).write(f"{name}/{key}", value).result()

    def edit(content: dict[str, Any]) -> None:
        record = content["leaves"][name]
        found = value[-4:].hex() + xxhash.xxh3_128_hexdigest(bytes(64))
        record["checksums"] = found + record["checksums"][40:]

    manifest = path / "zarr.json"
    manifest.write_bytes(edited(manifest.read_bytes(), edit))


def save_compressed(
    path: str,
    layout: eqx_ckpt.typing.Layout,
    compression: eqx_ckpt.typing.Compression = "zstd",
) -> None:
    with small_chunks():
        eqx_ckpt.tree_serialise_leaves(
            path, tree(1), layout=layout, compression=compression
        )


def save_large_pieces(path: str) -> None:
    """In the background, with little room: pieces that do not fit into a batch.

    Shards with a prime number of columns are not cut.
    """
    jax.config.update("jax_num_cpu_devices", 8)
    staging.MAX_IN_FLIGHT = 48 * 2**10
    options = Directory.database._replace(max_transaction=staging.MAX_IN_FLIGHT)
    Directory.database = options
    chunk_values._MAX_IN_FLIGHT, chunk_values._LEAST = 32 * 2**10, 64
    mesh = jax.make_mesh((8,), ("x",))
    rows = np.arange(64 * 20011, dtype=np.float32).reshape(64, 20011)
    saved = jax.device_put(rows, NamedSharding(mesh, PartitionSpec("x")))
    with small_chunks(2**10):
        eqx_ckpt.tree_serialise_leaves_async(
            path, saved, layout="ocdbt", staging_bytes=1
        ).result()
    restored = eqx_ckpt.tree_deserialise_leaves(path, saved)
    assert np.asarray(restored).tobytes() == rows.tobytes()
