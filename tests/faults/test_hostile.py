"""Input made to do harm ends in a typed error, within bounded time and memory.

Each case runs in a child of its own with bounded memory and time, so that a crash, a
hang, or an exhausted memory is a failed test. See test_hostile_files.py for files that
are not what they seem.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from eqx_ckpt import tree_serialise_leaves
from faults import readers, workloads
from faults.manifests import edited, mutant, sealed
from faults.readers import MEMORY, read_in_child, TIMEOUT
from faults.zygote import Zygote


MUTANTS = 1000


@pytest.fixture
def path(zygote: Zygote, disk: pathlib.Path) -> pathlib.Path:
    zygote.call(workloads.save, str(disk / "new"), 1)
    return disk / "new"


def _weight(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Change fields of a leaf's record."""
    return lambda content: content["leaves"]["layer/weight"].update(fields)


def _step(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Change fields of a scalar's record."""
    return lambda content: content["leaves"]["step"].update(fields)


def _top(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(fields)


def _renamed(name: str, key_path: Any) -> Callable[[dict[str, Any]], None]:
    """Call the leaf `layer/weight` otherwise."""

    def edit(content: dict[str, Any]) -> None:
        record = content["leaves"].pop("layer/weight")
        content["leaves"][name] = {**record, "path": key_path}

    return edit


def _array(shape: Any, chunk: Any, chunks: int = 1, **fields: Any):
    checksums = "0" * 40 * chunks
    return _weight(
        shape=shape, data_shape=shape, chunk_shape=chunk, checksums=checksums, **fields
    )


def _sharding(names: Any, spec: Any, memory_kind: Any = None):
    sizes = [1] * len(names) if isinstance(names, list) else "x"
    sharding = {"axis_names": names, "mesh_shape": sizes, "spec": spec}
    return _weight(sharding=sharding | {"memory_kind": memory_kind})


def _deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


def test_the_seal_is_right(zygote: Zygote, path: pathlib.Path) -> None:
    """An edit that does no harm is accepted: the edits below reach what they test."""
    manifest = path / "zarr.json"
    manifest.write_bytes(edited(manifest.read_bytes(), _top(metadata={"a": 1})))
    assert set(read_in_child(zygote, path).values()) == {""}
    manifest.write_bytes(manifest.read_bytes().replace(b'{"a": 1}', b'{"a": 2}'))
    assert read_in_child(zygote, path)["read_manifest"] == "CorruptCheckpointError"


NOT_JSON: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda m: b"",
    "no JSON": lambda m: b"\x80\x04\x95",
    "another encoding": lambda m: m.decode().encode("utf-16"),
    "null bytes": lambda m: bytes(4096),
    "nesting of lists": lambda m: b"[" * 10**5,
    "nesting of dictionaries": lambda m: b'{"a":' * 10**5,
    "closed nesting": lambda m: b"[" * 10**5 + b"]" * 10**5,
    "nesting in a field": lambda m: sealed(
        m.replace(b'"metadata": null', b'"metadata": ' + b"[" * 10**5 + b"]" * 10**5)
    ),
    "a duplicate key": lambda m: sealed(
        m.replace(b'"root": ""', b'"root": "", "root": "@a/"')
    ),
    "a duplicate leaf": lambda m: sealed(m.replace(b'"layer/bias"', b'"layer/weight"')),
    "NaN": lambda m: sealed(m.replace(b'"metadata": null', b'"metadata": NaN')),
    "Infinity": lambda m: sealed(
        m.replace(b'"metadata": null', b'"metadata": Infinity')
    ),
    "a number of a million digits": lambda m: sealed(
        m.replace(b'"metadata": null', b'"metadata": ' + b"9" * 10**6)
    ),
    "100 MB": lambda m: m + b" " * (100 * 2**20),
}


@pytest.mark.parametrize("case", NOT_JSON)
def test_hostile_json(zygote: Zygote, path: pathlib.Path, case: str) -> None:
    manifest = path / "zarr.json"
    before = manifest.read_bytes()
    after = NOT_JSON[case](before)
    assert after != before
    manifest.write_bytes(after)
    assert set(read_in_child(zygote, path).values()) <= {
        "CorruptCheckpointError",
        "CheckpointNotFoundError",  # not even the beginning of a manifest
    }


@pytest.mark.parametrize("item", ["[],", "{},", '{"a":0},'])
def test_json_that_is_large_in_memory(
    zygote: Zygote, path: pathlib.Path, item: str
) -> None:
    """60 MB of text are many times that in memory, and take long to build."""
    items = item.encode() * (60 * 2**20 // len(item))
    manifest = path / "zarr.json"
    field = b'"metadata": [' + items + b"0]"
    manifest.write_bytes(
        sealed(manifest.read_bytes().replace(b'"metadata": null', field))
    )
    assert read_in_child(zygote, path, "read_manifest")["read_manifest"]


def _separators(value: Any) -> Callable[[dict[str, Any]], None]:
    """Those of a copy."""
    return _top(optional={"separators": value})


SESSION = ["0123456789abcdef", None, None]
LATER = ["fedcba9876543210", 2, "0" * 64]


def _history(*sessions: Any, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """That of a step of a run."""
    found = {"run": "0" * 32, "step": 3, "earlier": 0, "sessions": [*sessions]}
    return _top(optional={"history": found | fields})


# What no checkpoint says: refused by every reader, before TensorStore sees it.
REFUSED: dict[str, Callable[[dict[str, Any]], None]] = {
    "no leaves": _top(leaves=None),
    "leaves in a list": _top(leaves=[]),
    "leaves that are numbers": _top(leaves={"a": 1}),
    "a root above": _top(root="../"),
    "an absolute root": _top(root="/etc/"),
    "a root that goes up": _top(root="@a/../../"),
    "a root that is a number": _top(root=1),
    "separators that are a number": _separators(1),
    "separators that are none": _separators(None),
    "separators in a list": _separators(["."]),
    "a thousand separators": _separators("." * 1000),
    "separators that are not among what is optional": _top(separators="."),
    "a history that is none": _top(optional={"history": None}),
    "a history in a list": _top(optional={"history": []}),
    "a history that is not among what is optional": _top(history={}),
    "a history without sessions": _history(),
    "a history of a thousand sessions": _history(*[SESSION] * 1000),
    "a history that names itself": _history(SESSION, ["0123456789abcdef", 2, "0" * 64]),
    "a history with more than there is": _history(SESSION, code=1),
    "a history of no run": _history(SESSION, run="../a"),
    "a history of a step that is none": _history(SESSION, step=-1),
    "a history of a step in words": _history(SESSION, step="3"),
    "a history of a step of 2**100": _history(SESSION, step=2**100),
    "a history with less than nothing before": _history(LATER, earlier=-1),
    "a history that begins twice": _history(LATER, SESSION),
    "a history that begins after another": _history(SESSION, earlier=1),
    "a fork of nothing": _history(SESSION, forked=None),
    "a fork of two": _history(SESSION, forked=["0" * 32, 3]),
    "a fork of another id": _history(SESSION, forked=["../a", 3, "0" * 64]),
    "a fork of a bool": _history(SESSION, forked=[None, True, "0" * 64]),
    "a fork without a digest": _history(SESSION, forked=[None, 3, None]),
    "a session that is a number": _history(1),
    "a session of two": _history(SESSION[:2]),
    "a session with another id": _history(["x" * 16, None, None]),
    "a session of a step without a digest": _history([LATER[0], 2, None]),
    "a session of a digest without a step": _history([LATER[0], None, "0" * 64]),
    "a session of a bool": _history([LATER[0], True, "0" * 64]),
    "no optional fields": _top(optional=None),
    "optional fields in a list": _top(optional=[]),
    "necessary fields in a list": _top(necessary=[]),
    "a part of nothing": _top(necessary={"part": None}),
    "a part of two": _top(necessary={"part": ["0" * 32, 1]}),
    "a part with another id": _top(necessary={"part": ["../a", 0, 1]}),
    "a part of fewer processes": _top(necessary={"part": ["0" * 32, 2, 2]}),
    "a part of a bool": _top(necessary={"part": ["0" * 32, False, 1]}),
    "versions in a list": _top(versions=[]),
    "unsaved that are numbers": _top(unsaved={"a": 1}),
    "an unknown key": _top(code="os.system('true')"),
    "format version 0": _top(format_version=0),
    "format version -1": _top(format_version=-1),
    "a format version in words": _top(format_version="one"),
    "a format version in a list": _top(format_version=[]),
    "metadata that are no float": _top(metadata={"@float": "none"}),
    "metadata that are a float's list": _top(metadata={"@float": []}),
    "deep metadata": _top(metadata=_deep(200)),
    "a name that goes up": _renamed("../../out", [["key", "../../out"]]),
    "a name with another path": _renamed("../out", [["key", "layer"]]),
    "an absolute name": _renamed("/etc/passwd", [["key", "/etc/passwd"]]),
    "dots as a name": _renamed("..", [["key", ".."]]),
    "a dot as a name": _renamed(".", [["key", "."]]),
    "an empty name": _renamed("", []),
    "a name with a null byte": _renamed("a\0b", [["key", "a\0b"]]),
    "a name with a surrogate": _renamed("\ud800", [["key", "\ud800"]]),
    "a path that is a number": _weight(path=1),
    "a path of numbers": _weight(path=[1, 2]),
    "a path of nothing": _weight(path=[[], []]),
    "a path of floats": _weight(path=[["attr", 1.5]]),
    "a path of bools": _weight(path=[["attr", True]]),
    "kinds of path that are lists": _weight(path=[[[], "layer"], [{}, "weight"]]),
    "no kind": _weight(kind=None),
    "another kind": _weight(kind="pickle"),
    "a kind that is a list": _weight(kind=[]),
    "an array that is a scalar": _weight(kind="int"),
    "an array that is a scalar of NumPy": _weight(kind="numpy_scalar"),
    "bytes of two axes": _array([8, 4], [8, 4], 1, kind="bytes", dtype="uint8"),
    "bytes without an axis": _array(
        [], [], 1, kind="bytes", dtype="uint8", data_type="uint8"
    ),
    "bytes that are floats": _array([8], [8], 1, kind="bytes"),
    "an array that is a key": _weight(kind="key"),
    "a key of a numbered kind": _weight(
        kind="key", impl=5, dtype="key", shape=[8], data_type="uint32"
    ),
    "a key of floats": _weight(kind="key", impl="rbg", dtype="key", shape=[8]),
    "a key whose dtype is a list": _weight(
        kind="key", impl="rbg", dtype=["key"], shape=[8], data_type="uint32"
    ),
    "a JAX array with swapped bytes": _weight(kind="jax", dtype=">f4"),
    "data type r32": _weight(data_type="r32"),
    "data type and dtype r32": _weight(data_type="r32", dtype="r32"),
    "data type r99999999": _weight(data_type="r99999999", dtype="r99999999"),
    "data type object": _weight(data_type="object", dtype="object"),
    "data type O": _weight(data_type="O", dtype="|O"),
    "data type string": _weight(data_type="string", dtype="string"),
    "data type float128": _weight(data_type="float128", dtype=">f16"),
    "a data type that is a list": _weight(data_type=[["a", "f4"]], dtype=[["a", "f4"]]),
    "a data type that is none": _weight(data_type=None, dtype=None),
    "a date without a unit": _weight(data_type="int64", dtype="<M8[0s]"),
    "a shape that is a number": _weight(shape=8, data_shape=8),
    "a negative shape": _array([-8, 4], [2, 4]),
    "a shape of floats": _array([8.0, 4], [2, 4]),
    "a shape of bools": _array([True, True], [1, 1]),
    "a shape of strings": _array(["8", "4"], ["2", "4"]),
    "a shape of 1000 axes": _array([1] * 1000, [1] * 1000),
    "shapes that differ": _weight(shape=[4, 8]),
    "a shape of 2**63": _array([2**63], [2**63]),
    "a shape of 2**100": _array([2**100], [2**100]),
    "chunks of nothing": _weight(chunk_shape=[0, 0]),
    "chunks of less than nothing": _weight(chunk_shape=[-1, -1]),
    "chunks of another rank": _weight(chunk_shape=[8]),
    "chunks of 2**61": _array([2**61, 2**61], [2**61, 2**61]),
    "chunks of floats": _weight(chunk_shape=[2.0, 4.0]),
    "no checksums": _weight(checksums=""),
    "half a checksum": _weight(checksums="0000"),
    "checksums that are numbers": _weight(checksums=5),
    "checksums in a list": _weight(checksums=["0" * 40] * 4),
    "checksums that are no numbers": _weight(checksums="xyzxy" * 8 * 4),
    "a weak type in words": _weight(weak_type="yes"),
    "a sharding in words": _weight(sharding="x"),
    "a sharding of nothing": _weight(sharding={}),
    "a sharding of wrong types": _sharding(names=5, spec={}),
    "a sharding of nested lists": _sharding([["data"]], [[["data"]], {"a": 1}]),
    "a sharding over an axis twice": _sharding(["data"], ["data", "data"]),
    "a sharding over an axis twice at once": _sharding(["data"], [["data", "data"]]),
    "a sharding over two axes of one name": _sharding(["data", "data"], ["data"]),
    "a sharding over another axis": _sharding(["data"], ["model"]),
    "a sharding in a memory that is a list": _sharding(["data"], ["data"], []),
    "a scalar without a value": _step(value=None),
    "a scalar in words": _step(value="one"),
    "a scalar and a space": _step(value=" 1"),
    "a scalar and a line": _step(value="1\n"),
    "a scalar with an underscore": _step(value="1_0"),
    "a scalar in other digits": _step(value="\uff11"),
    "a small scalar in hexadecimal digits": _step(value="0x1"),
    "a scalar of a million digits": _step(value="1" * 10**6),
    "a bool in words": _step(kind="bool", value="yes"),
    "a float in words": _step(kind="float", value="one"),
    "a NaN in words": _step(kind="float", value="nan:zz"),
    "a NaN of a byte": _step(kind="float", value="nan:00"),
    "a NaN that is none": _step(kind="float", value="nan:3ff0000000000000"),
    "a complex of one part": _step(kind="complex", value="1.0"),
    "a scalar that is an array": _step(kind="jax"),
}


@pytest.mark.once
@pytest.mark.parametrize("case", REFUSED)
def test_hostile_manifest(zygote: Zygote, path: pathlib.Path, case: str) -> None:
    manifest = path / "zarr.json"
    manifest.write_bytes(edited(manifest.read_bytes(), REFUSED[case]))
    assert set(read_in_child(zygote, path).values()) == {"CorruptCheckpointError"}


# What a checkpoint might say, but these files do not bear out: refused when read.
UNTRUE: dict[str, Callable[[dict[str, Any]], None]] = {
    "a shape of 2**30": _array([2**30], [2**30]),
    "a shape of 2**40": _array([2**40], [2**40]),
    "2**40 bytes": _array([2**40], [2**40], dtype="uint8", data_type="uint8"),
    "2**40, compressed": _array([2**40], [2**40], compression="zstd"),
    "many axes of 2": _array([2] * 30, [2] * 30),
    "huge chunks": _array([8, 4], [2**30, 2**29]),
    "a hundred thousand chunks": _array([10**5], [1], 10**5),
    "another size": _weight(dtype="float64", data_type="float64"),
    "another place": _renamed("elsewhere", [["key", "elsewhere"]]),
    "other chunks": _weight(chunk_shape=[8, 1]),
    "another root": _top(root="@attempt/"),
}


@pytest.mark.parametrize("case", UNTRUE)
def test_untrue_manifest(zygote: Zygote, path: pathlib.Path, case: str) -> None:
    manifest = path / "zarr.json"
    manifest.write_bytes(edited(manifest.read_bytes(), UNTRUE[case]))
    answers = read_in_child(zygote, path)
    assert answers["restore itself"] == "CorruptCheckpointError"
    assert answers["verify"] == "CorruptCheckpointError"


# What concerns only some of the readers, or none: no reader may die of it.
ODD: dict[str, Callable[[dict[str, Any]], None]] = {
    "no leaf at all": _top(leaves={}),
    "ten thousand leaves": lambda content: content.update(
        leaves={
            f"a{i}": {"kind": "int", "path": [["key", f"a{i}"]], "value": "1"}
            for i in range(10**4)
        }
    ),
    "separators of a pattern": _separators("]^-\\["),
    "a history of many": _history(LATER, earlier=10**6),
    "separators that are no text": _separators("\n\ud800"),
    "another dtype": _weight(dtype="int32", data_type="int32"),
    "a leaf inside another": lambda content: content["leaves"].update(
        layer={"kind": "int", "path": [["key", "layer"]], "value": "1"}
    ),
    "a leaf before what is inside it": lambda content: content.update(
        leaves={
            "layer": {"kind": "int", "path": [["key", "layer"]], "value": "1"},
            **content["leaves"],
        }
    ),
    "a scalar of a million hexadecimal digits": _step(value="0x" + "f" * 10**6),
    "an empty array with a huge axis": _array([0, 2**61], [1, 1], 0),
    "a key of a kind that is no text": _weight(
        kind="key", impl="\ud800", dtype="key", shape=[8], data_type="uint32"
    ),
    "a key of an unknown kind": _weight(
        kind="key",
        impl="rot13",
        dtype="key",
        shape=[8],
        data_type="uint32",
    ),
    "a key whose data have another shape": _weight(
        kind="key",
        impl="threefry2x32",
        dtype="key",
        shape=[8],
        data_type="uint32",
    ),
    "a sharding of many axes": _sharding([f"a{i}" for i in range(9)], ["a0", "a8"]),
    "a sharding of numbered axes": _sharding([5, 7], [7, [5]]),
    "a sharding in no known memory": _sharding(["data"], ["data"], "moon"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_manifest(zygote: Zygote, path: pathlib.Path, case: str) -> None:
    manifest = path / "zarr.json"
    manifest.write_bytes(edited(manifest.read_bytes(), ODD[case]))
    read_in_child(zygote, path)


def test_a_newer_format_is_no_damage(zygote: Zygote, path: pathlib.Path) -> None:
    manifest = path / "zarr.json"
    manifest.write_bytes(edited(manifest.read_bytes(), _top(format_version=2)))
    assert set(read_in_child(zygote, path).values()) == {"CheckpointError"}


def test_mutated_manifests(
    zygote: Zygote, path: pathlib.Path, disk: pathlib.Path
) -> None:
    with workloads.small_chunks(32):
        tree_serialise_leaves(path, workloads.every_kind(1), overwrite=True)
    manifest = (path / "zarr.json").read_bytes()
    mutants = [mutant(manifest, seed) for seed in range(MUTANTS)]
    progress = disk / "progress"
    outcome = zygote.run(
        readers.read_all_ways,
        str(path),
        mutants,
        str(progress),
        memory=MEMORY,
        timeout=6 * TIMEOUT,
    )
    where = f"signal {outcome.signal} at mutant {progress.read_text()}"
    assert not outcome.signal, where
    assert outcome.error is None, f"{outcome.error!r} at {where}"
    assert outcome.value == {}
