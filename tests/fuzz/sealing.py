"""Writers of files that are looked at only if what belongs to them says the same.

A checksum, a digest or a length in another file tells that a byte has changed. What is
fuzzed is the content, and its writer makes all of them right.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import databases, ocdbt
from tests.faults.manifests import rewritten


Write = Callable[[bytes], None]


def config(run: Path, step: Path) -> tuple[bytes, Write]:
    """The config of a run that has one, and its writer."""
    (file,) = run.glob("config.*.json")
    before = (step / "zarr.json").read_bytes()

    def write(data: bytes) -> None:
        id = hashlib.sha256(data).hexdigest()[:32]

        def edit(content: dict[str, Any]) -> None:
            content["optional"]["history"]["config"] = id

        (step / "zarr.json").write_bytes(rewritten(before, edit))
        for old in run.glob("config.*.json"):
            old.unlink()
        (run / f"config.{id}.json").write_bytes(data)

    return file.read_bytes(), write


def chunk(path: Path, name: str, key: str) -> tuple[bytes, Write]:
    """The compressed bytes of the only chunk of a leaf, and their writer."""

    def write(data: bytes) -> None:
        databases.put_chunk(path, "zarr", name, key, data)

    return (path / name / key).read_bytes()[:-4], write


def header(file: Path) -> tuple[bytes, Write]:
    """The header of a file of safetensors, and its writer."""
    stored = file.read_bytes()
    end = 8 + int.from_bytes(stored[:8], "little")

    def write(data: bytes) -> None:
        file.write_bytes(len(data).to_bytes(8, "little") + data + stored[end:])

    return stored[8:end], write


def database(root: Path) -> dict[str, tuple[bytes, Write]]:
    """What the manifest and the root of a database say, and their writers.

    The database is written anew first, with nothing compressed.
    """
    stored = b""
    entries: dict[str, bytes | ocdbt.Place] = {}
    for key, value in databases.values_of(root).items():
        is_long = len(value) > 100
        place = ocdbt.Place(len(stored), len(value))
        entries[key.decode()] = place if is_long else value
        stored += value if is_long else b""
    shutil.rmtree(root / "d")
    node = ocdbt.body_of(ocdbt.leaf(entries))

    def write_node(data: bytes) -> None:
        ocdbt.write(root, [ocdbt.node(data)], values=stored)

    write_node(node)
    manifest = root / ocdbt.MANIFEST

    def write_manifest(data: bytes) -> None:
        manifest.write_bytes(ocdbt.manifest(data))

    said = ocdbt.body_of(manifest.read_bytes())
    return {"node": (node, write_node), "manifest": (said, write_manifest)}
