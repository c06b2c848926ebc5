"""Format version 1: what a stranger finds on disk."""

import hashlib
import json
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import zarr

import eqx_ckpt
from helpers import assert_same, files_below


DATA = Path(__file__).parents[1] / "data"
GOLDEN = DATA / "v1"


def golden_tree():
    """What `tests/data/v1*` hold. They were saved once, and are never saved again."""
    model, state = eqx.nn.make_with_state(
        lambda key: [
            eqx.nn.Linear(2, 3, key=key),
            eqx.nn.BatchNorm(3, "batch", mode="ema"),
        ]
    )(jax.random.key(0))
    # As numbers: what `eqx.nn.Linear` draws depends on the optimisations of XLA.
    weight = [
        [0.4841052591800690, -0.4491844177246094],
        [-0.385828435420990, -0.5363749265670776],
        [-0.4358415603637695, 0.3139766454696655],
    ]
    bias = [-0.6967917680740356, -0.6775621771812439, 0.1151544600725174]
    model = eqx.tree_at(
        lambda model: (model[0].weight, model[0].bias),
        model,
        (jnp.array(weight), jnp.array(bias)),
    )
    return {
        "model": model,
        "state": state,
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(7, impl="rbg"), 2),
        "bfloat16": jnp.arange(4, dtype=jnp.bfloat16),
        "uint4": jnp.arange(4).astype(jnp.uint4),
        "weak": jnp.asarray(1.5),
        "empty": jnp.zeros((0, 3)),
        "numpy": np.arange(3) + 2**40,
        "big-endian": np.arange(3, dtype=">f4"),
        "dates": np.array(["2026-11-20"], "M8[D]"),
        "scalar": np.float64(0.1),
        "a/b": True,
        "int": 10**40,
        "float": -0.0,
        "nan": float("nan"),
        "complex": complex(1, float("-inf")),
        "activation": jax.nn.relu,
    }


@pytest.mark.parametrize(("name", "layout"), [("v1", "zarr"), ("v1-ocdbt", "ocdbt")])
def test_the_golden_checkpoints_restore(name, layout):
    golden = DATA / name
    eqx_ckpt.inspect.verify(golden)
    like = golden_tree()
    assert_same(eqx_ckpt.tree_deserialise_leaves(golden, like), like)
    assert eqx_ckpt.tree_match(golden, like).ok
    manifest = eqx_ckpt.inspect.read_manifest(golden)
    assert (manifest.format_version, manifest.layout) == (1, layout)
    assert manifest.metadata == {"loss": 0.25}


def test_the_golden_run_has_its_history():
    digest = re.search(
        '"digest": "(.*)"', (DATA / "v1-run/000001/zarr.json").read_text()
    )
    first, last = (
        eqx_ckpt.inspect.read_manifest(DATA / f"v1-run/00000{step}").history
        for step in (1, 2)
    )
    assert digest
    assert first
    assert last
    assert (first.step, last.step, last.earlier) == (1, 2, 0)
    assert first.run == last.run
    assert last.sessions[:1] == first.sessions
    assert last.sessions[1][1:] == (1, digest[1])


def test_the_golden_step_has_chunks_in_a_step_that_was_deleted():
    golden = DATA / "v1-references" / "000002"
    assert eqx_ckpt.inspect.verify(golden)
    manifest = eqx_ckpt.inspect.read_manifest(golden)
    (attempt,) = {*manifest.references["b"]}
    assert manifest.references == {"b": (attempt,), "w": ("", attempt)}
    found = eqx_ckpt.tree_deserialise_leaves(golden, eqx_ckpt.tree_like(golden))
    assert found["w"].tolist() == [-1, *range(1, 8)]
    assert (found["b"].tolist(), found["step"]) == ([1, 1, 1], 2)


def test_a_save_writes_what_it_wrote_when_the_golden_checkpoint_was_saved(tmp_path):
    eqx_ckpt.tree_serialise_leaves(
        tmp_path / "new", golden_tree(), metadata={"loss": 0.25}
    )
    assert files_below(tmp_path / "new") == files_below(GOLDEN)
    for name in files_below(GOLDEN) - {"zarr.json"}:
        assert (tmp_path / "new" / name).read_bytes() == (GOLDEN / name).read_bytes()

    def without_versions(path):
        text = (path / "zarr.json").read_text()
        return re.sub(r'"(digest|versions|others)": (".*?"|{[^{}]*})', "", text)

    assert without_versions(tmp_path / "new") == without_versions(GOLDEN)


def test_the_manifest_is_json_in_lines_that_can_be_compared(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", {"w": jnp.ones((2, 3)), "n": 5})
    text = (tmp_path / "new" / "zarr.json").read_text()
    document = json.loads(text)
    assert document["zarr_format"] == 3
    assert document["node_type"] == "group"
    content = document["attributes"]["eqx_ckpt"]
    assert content["format_version"] == 1
    assert content["leaves"]["n"] == [0, "k", "5"]
    assert content["types"][0] == {"kind": "int"}
    assert content["types"][content["leaves"]["w"][0]]["shape"] == [2, 3]
    assert set(content["versions"]) >= {"eqx_ckpt", "jax", "equinox", "tensorstore"}
    lines = [line.split('"')[1] for line in text.splitlines() if '": [' in line[:6]]
    assert lines == ["n", "w"]


def test_leaves_that_are_alike_have_one_type(tmp_path):
    """A leaf costs its name and little more: so a million of them fit."""
    layers = [{"w": np.zeros(2), "b": np.zeros(3)} for _ in range(50)]
    eqx_ckpt.tree_serialise_leaves(tmp_path / "few", layers[:5])
    eqx_ckpt.tree_serialise_leaves(tmp_path / "many", layers)
    few, many = ((tmp_path / n / "zarr.json").read_bytes() for n in ("few", "many"))
    assert len(json.loads(many)["attributes"]["eqx_ckpt"]["types"]) == 2
    assert len(many) - len(few) < 90 * 65


def test_zarr_python_reads_what_it_knows(tmp_path, getkey):
    dtypes = "bool int8 int64 uint16 float16 float32 float64 complex64 complex128"
    model = eqx.nn.MLP(2, 2, 4, 2, key=getkey())
    tree = {
        "model": model,
        "numpy": {
            name: np.arange(6).reshape(2, 3).astype(name) for name in dtypes.split()
        },
        "0-d": np.float32(3),
        "empty": jnp.zeros((0, 2)),
        "bfloat16": jnp.ones(3, jnp.bfloat16),
    }
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)
    group = zarr.open_group(tmp_path / "new", mode="r")
    for name, expected in tree["numpy"].items():
        np.testing.assert_array_equal(group[f"numpy/{name}"][...], expected)
    weight = group["model/layers/0/weight"]
    np.testing.assert_array_equal(weight[...], model.layers[0].weight)
    assert group["0-d"][()] == 3
    assert group["empty"].shape == (0, 2)


def test_tensorstore_opens_each_leaf_alone(tmp_path):
    tree = {
        "a": {"w": jnp.arange(6.0).reshape(2, 3)},
        "bfloat16": jnp.ones(3, jnp.bfloat16),
        "uint4": jnp.arange(4).astype(jnp.uint4),
        "key": jax.random.key(0),
    }
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree)

    def read(name):
        kvstore = {"driver": "file", "path": f"{tmp_path}/new/{name}/"}
        return ts.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()

    np.testing.assert_array_equal(read("a/w"), tree["a"]["w"])
    assert read("bfloat16").dtype == jnp.bfloat16
    np.testing.assert_array_equal(read("uint4").view(jnp.uint4), tree["uint4"])
    np.testing.assert_array_equal(read("key"), jax.random.key_data(tree["key"]))
    metadata = json.loads((tmp_path / "new" / "uint4" / "zarr.json").read_text())
    assert metadata["attributes"]["eqx_ckpt"]["dtype"] == "uint4"


def test_a_chunk_has_eight_mebibytes_at_most(tmp_path):
    """Larger ones cost more memory to read and write, smaller ones more files."""
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", {"w": jnp.zeros((5000, 1024))})
    chunks = list((tmp_path / "new" / "w").glob("c.*"))
    assert len(chunks) == 3
    assert max(p.stat().st_size for p in chunks) <= 8 * 2**20 + 4


def test_a_newer_format_says_that_it_is_newer(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", {"w": 1})
    manifest = tmp_path / "new" / "zarr.json"
    text = manifest.read_text().replace('"format_version": 1', '"format_version": 2')
    blank = re.sub(r'("digest": )"[0-9a-f]{64}"', rf'\1"{"0" * 64}"', text, count=1)
    digest = hashlib.sha256(blank.encode()).hexdigest()
    manifest.write_text(blank.replace("0" * 64, digest, 1))
    with pytest.raises(eqx_ckpt.CheckpointError, match="format version 2.*upgrade"):
        eqx_ckpt.inspect.read_manifest(tmp_path / "new")
