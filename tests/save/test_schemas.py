"""The files of a checkpoint, beside the schemas and the hashes of `docs/format.md`."""

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
import xxhash
import zarr
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt
from faults.manifests import edited

from .test_everything import everything


ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


def check(path, schema):
    text = (ROOT / "docs" / "schemas" / f"{schema}.json").read_text()
    jsonschema.Draft202012Validator(json.loads(text)).validate(
        json.loads(path.read_text())
    )


def content(path):
    return json.loads((path / "zarr.json").read_bytes())["attributes"]["eqx_ckpt"]


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_manifests_follow_the_schema(tmp_path, layout, compression):
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    tree = {
        "all": everything(),
        "sharded": jax.device_put(jnp.zeros((8, 2)), NamedSharding(mesh, P("data"))),
    }
    path = tmp_path / "ckpt"
    eqx_ckpt.tree_serialise_leaves(
        path, tree, layout=layout, compression=compression, metadata={"a": [1, np.nan]}
    )
    check(path / "zarr.json", "manifest")
    np.savez(tmp_path / "x.npz", **{"a.b": np.ones(3)})
    source = eqx_ckpt.interop.open_npz(tmp_path / "x.npz")
    eqx_ckpt.copy(source, tmp_path / "copy")
    assert content(tmp_path / "copy")["optional"] == {"separators": "/."}
    check(tmp_path / "copy" / "zarr.json", "manifest")


def test_a_step_with_a_history_follows_the_schema(tmp_path):
    for step in (1, 2):
        config = {"lr": 0.1} if step == 2 else None
        with eqx_ckpt.CheckpointManager(tmp_path / "run", config=config) as manager:
            tree = {"w": jnp.ones(3)}
            tree = manager.restore(tree) if step == 2 else tree
            manager.save(step, tree)
        check(tmp_path / f"run/{step:06d}/zarr.json", "manifest")
    manager.fork(tmp_path / "fork")
    check(tmp_path / "fork/000002/zarr.json", "manifest")
    history = content(tmp_path / "run/000002")["optional"]["history"]
    digest = content(tmp_path / "run/000001")["digest"]
    assert history["sessions"][-1][1:] == [1, digest]
    (config,) = tmp_path.glob("run/config.*.json")
    found = hashlib.sha256(config.read_bytes()).hexdigest()[:32]
    assert config.name == f"config.{found}.json"
    assert history["config"] == found


def test_the_golden_files_follow_the_schemas():
    for name in (
        "v1",
        "v1-ocdbt",
        "v1-recording/states/000002",
        "v1-references/000002",
        "v1-run/000002",
    ):
        check(DATA / name / "zarr.json", "manifest")
    check(DATA / "v1-recording" / "recording.json", "recording")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("optional", {"history": {"run": "0" * 32, "step": 1, "sessions": []}}),
        ("root", "../"),
        ("necessary", {"references": 1}),
        ("necessary", {"part": ["0" * 32, 1]}),
        ("code", "x"),
        ("types", [{"kind": "pickle"}]),
        ("leaves", {"../out": [0, "k", ""]}),
    ],
)
def test_the_schema_refuses_what_a_reader_refuses(tmp_path, field, value):
    document = json.loads((DATA / "v1" / "zarr.json").read_bytes())
    document["attributes"]["eqx_ckpt"][field] = value
    (tmp_path / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(jsonschema.ValidationError):
        check(tmp_path / "zarr.json", "manifest")


def hashes(path):
    leaves = eqx_ckpt.inspect.read_manifest(path).leaves
    return {name: [text[8:] for text in leaves[name].checksums] for name in leaves}


def test_the_hashes_are_those_of_the_elements(tmp_path):
    """Of each chunk without its padding, as zarr-python reads it."""
    rng = np.random.default_rng(0)
    tree = {
        "long": jnp.asarray(rng.normal(size=3_000_001), jnp.float32),
        "wide": np.asfortranarray(rng.normal(size=(1021, 1031, 3))),
        "swapped": np.arange(5, dtype=">i4"),
        "number": jnp.asarray(2.5),
        "none": np.zeros((0, 3)),
        "key": jax.random.key(3),
    }
    path = tmp_path / "ckpt"
    eqx_ckpt.tree_serialise_leaves(path, tree)
    group = zarr.open_group(path, mode="r")
    found = hashes(path)
    for name, record in eqx_ckpt.inspect.read_manifest(path).leaves.items():
        values, step = group[name][...], record.chunk_shape
        chunks = [
            values[
                tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, step, strict=True))
            ]
            for at in np.ndindex(
                *(-(-n // c) for n, c in zip(values.shape, step, strict=True))
            )
        ]
        expected = [xxhash.xxh3_128_hexdigest(chunk.tobytes()) for chunk in chunks]
        assert found[name] == expected, name
    assert len(found["wide"]) > 1
    for i, (place, how) in enumerate(
        [
            (tmp_path, {"compression": "zstd"}),
            (tmp_path, {"layout": "ocdbt"}),
            ("memory://hashes", {}),
            ("memory://hashes", {"compression": "zstd", "layout": "ocdbt"}),
        ]
    ):
        eqx_ckpt.tree_serialise_leaves(f"{place}/{i}", tree, **how)
        assert hashes(f"{place}/{i}") == found
        eqx_ckpt.inspect.verify(f"{place}/{i}")


def test_verify_finds_a_chunk_that_was_changed_so_that_its_checksum_stays(tmp_path):
    path = tmp_path / "ckpt"
    tree = {"w": jnp.arange(16), "b": jnp.ones(3)}
    eqx_ckpt.tree_serialise_leaves(path, tree)
    file = path / "w" / "c.0"
    # With the polynomial of CRC-32C itself.
    data = int.from_bytes(file.read_bytes(), "little") ^ (1 | 0x82F63B78 << 1)
    file.write_bytes(data.to_bytes(file.stat().st_size, "little"))
    restored = eqx_ckpt.tree_deserialise_leaves(path, tree)
    assert restored["w"].tolist() != tree["w"].tolist()
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'w'.*hash differs"):
        eqx_ckpt.inspect.verify(path)


def with_field(path, part):
    """Give a manifest a field that a later version may add."""
    eqx_ckpt.tree_serialise_leaves(path, {"w": jnp.ones(3)}, metadata={"a": 1})
    file = path / "zarr.json"
    later = edited(file.read_bytes(), lambda found: found[part].update(later=[1]))
    file.write_bytes(later)


READERS = [
    lambda path: eqx_ckpt.tree_deserialise_leaves(path, {"w": jnp.zeros(3)}),
    eqx_ckpt.inspect.read_manifest,
    eqx_ckpt.inspect.verify,
    lambda path: eqx_ckpt.copy(path, f"{path}-copy"),
]


@pytest.mark.parametrize("read", READERS)
def test_an_optional_field_of_a_later_version_is_ignored(tmp_path, read):
    with_field(tmp_path / "ckpt", "optional")
    read(tmp_path / "ckpt")


@pytest.mark.parametrize("read", READERS)
def test_a_necessary_field_of_a_later_version_is_refused_by_name(tmp_path, read):
    with_field(tmp_path / "ckpt", "necessary")
    with pytest.raises(eqx_ckpt.CheckpointError, match="newer version.*'later'") as e:
        read(tmp_path / "ckpt")
    assert not isinstance(e.value, eqx_ckpt.CorruptCheckpointError)


def test_a_step_with_a_necessary_field_is_not_passed_over(tmp_path):
    """Another version can read it: it is neither damaged, nor replaced."""
    with eqx_ckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": jnp.ones(3)})
    with_field(tmp_path / "000002", "necessary")
    manager = eqx_ckpt.CheckpointManager(tmp_path)
    with pytest.raises(eqx_ckpt.CheckpointError, match="newer version"):
        manager.restore({"w": jnp.zeros(3)}, on_damage="fallback")
