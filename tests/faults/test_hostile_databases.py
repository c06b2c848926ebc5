"""Databases, and compressed chunks, that are made to do harm.

Each case runs in a child of its own with bounded memory and time, see test_hostile.py.
"""

import os
import pathlib
import random
from typing import Any

import pytest

import eqx_ckpt
from faults import databases, workloads
from faults.manifests import edited
from faults.readers import MEMORY, read_in_child, TIMEOUT
from faults.zygote import Zygote


MUTANTS = 300
LAYOUTS = ["zarr", "ocdbt"]


@pytest.fixture
def path(zygote: Zygote, disk: pathlib.Path) -> pathlib.Path:
    zygote.call(workloads.save, str(disk / "new"), 1, False, "ocdbt")
    return disk / "new"


def _data_file(path: pathlib.Path) -> pathlib.Path:
    return next((path / "d").iterdir())


# What the manifest says of the layout.


@pytest.mark.parametrize("layout", ["", "Zarr", "n5", None, 0, [], {}, ["ocdbt"]])
def test_an_unknown_layout(zygote: Zygote, path: pathlib.Path, layout: Any) -> None:
    manifest = path / "zarr.json"
    manifest.write_bytes(
        edited(manifest.read_bytes(), lambda content: content.update(layout=layout))
    )
    assert set(read_in_child(zygote, path).values()) == {"CorruptCheckpointError"}


@pytest.mark.parametrize("codec", ["", "gzip", "ZSTD", 0, False, [], {}, ["zstd"]])
def test_an_unknown_compression(zygote: Zygote, path: pathlib.Path, codec: Any) -> None:
    def edit(content: dict[str, Any]) -> None:
        content["leaves"]["layer/weight"]["compression"] = codec

    manifest = path / "zarr.json"
    manifest.write_bytes(edited(manifest.read_bytes(), edit))
    assert set(read_in_child(zygote, path).values()) == {"CorruptCheckpointError"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_layout(
    zygote: Zygote, disk: pathlib.Path, layout: eqx_ckpt.typing.Layout
) -> None:
    """The manifest says the other one."""
    path = disk / "new"
    zygote.call(workloads.save, str(path), 1, False, layout)
    other = LAYOUTS[layout == "zarr"]
    manifest = path / "zarr.json"
    manifest.write_bytes(
        edited(manifest.read_bytes(), lambda content: content.update(layout=other))
    )
    answers = read_in_child(zygote, path)
    assert answers["restore"] == answers["verify"] == "CorruptCheckpointError"


def test_a_huge_data_file(zygote: Zygote, path: pathlib.Path) -> None:
    """What is behind its end is nobody's, and not read."""
    os.truncate(_data_file(path), 2**40)
    read_in_child(zygote, path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_huge_compressed_chunk(
    zygote: Zygote, disk: pathlib.Path, layout: eqx_ckpt.typing.Layout
) -> None:
    path = disk / "new"
    zygote.call(databases.save_compressed, str(path), layout)
    place = path / "layer/weight/c.1.0" if layout == "zarr" else _data_file(path)
    os.truncate(place, 2**40)
    answers = read_in_child(zygote, path)
    if layout == "zarr":
        assert answers["restore"] == answers["verify"] == "CorruptCheckpointError"


# What is not what TensorStore has written.


def _knock_all(
    zygote: Zygote, path: pathlib.Path, file: pathlib.Path, contents: list[bytes]
) -> None:
    progress = path.with_name("progress")
    args = (str(path), str(file.relative_to(path)), contents, str(progress))
    outcome = zygote.run(
        databases.read_all_ways, *args, memory=MEMORY, timeout=3 * TIMEOUT
    )
    where = f"signal {outcome.signal} at number {progress.read_text()}"
    assert not outcome.signal, where
    assert outcome.error is None, f"{outcome.error!r} at {where}"
    assert outcome.value == []


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d/*"])
def test_no_database(zygote: Zygote, path: pathlib.Path, name: str) -> None:
    numbers = random.Random(0)
    file = next(path.glob(name))
    sound = file.read_bytes()
    contents = [numbers.randbytes(n) for n in range(0, 4 * len(sound), 97)]
    contents += [sound[:4] + numbers.randbytes(n) for n in range(0, 300, 7)]
    contents += [sound[:n] for n in range(0, len(sound), 1 + len(sound) // 50)]
    contents += [databases.checked(sound[:n]) for n in range(4, len(sound) - 4, 41)]
    _knock_all(zygote, path, file, contents)


@pytest.mark.parametrize("name", ["manifest.ocdbt", "d/*"])
def test_mutated_databases(zygote: Zygote, path: pathlib.Path, name: str) -> None:
    databases.inflate(path)
    assert set(read_in_child(zygote, path).values()) == {""}
    file = next(path.glob(name))
    contents = [*databases.mutants(file.read_bytes(), MUTANTS)]
    _knock_all(zygote, path, file, contents)


# What becomes more, or less, than it should. A chunk of the weight has 64 bytes.
FRAMES: dict[str, bytes] = {
    "a bomb of 16 GiB": databases.bomb(2**34),
    "one byte more": databases.zstd([(65, b"\0")]),
    "one byte less": databases.zstd([(63, b"\0")]),
    "nothing": databases.zstd([(0, b"\0")]),
    "two frames": databases.zstd([(64, b"\0")]) * 2,
    "a frame and more": databases.zstd([(64, b"\0")]) + b"more",
    "half a frame": databases.bomb(2**20)[:-9],
    "a frame that says that it has 2**60 bytes": (
        b"\x28\xb5\x2f\xfd\xe0" + (2**60).to_bytes(8, "little") + b"\x03\x02\x00\0"
    ),
    "a window of 2**41 bytes": b"\x28\xb5\x2f\xfd\x00\xf8\x03\x02\x00\0",
    "no frame": b"no frame",
    "no byte": b"",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_frames_are_right(
    zygote: Zygote, disk: pathlib.Path, layout: eqx_ckpt.typing.Layout
) -> None:
    """A frame that becomes what it should is taken: the others reach what they test."""
    path = disk / "new"
    zygote.call(databases.save_compressed, str(path), layout)
    frame = databases.zstd([(64, b"\0")])
    databases.put_chunk(path, layout, "layer/weight", "c.0.0", frame)
    assert read_in_child(zygote, path, "verify", "restore") == {
        "verify": "",
        "restore": "",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", FRAMES)
def test_hostile_frame(
    zygote: Zygote, disk: pathlib.Path, layout: eqx_ckpt.typing.Layout, case: str
) -> None:
    path = disk / "new"
    zygote.call(databases.save_compressed, str(path), layout)
    databases.put_chunk(path, layout, "layer/weight", "c.0.0", FRAMES[case])
    answers = read_in_child(zygote, path)
    assert answers["verify"] == "CorruptCheckpointError"
    assert answers["restore"] == "CorruptCheckpointError"
