"""What went out to another format and came back has the same values."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import interop
from eqx_ckpt.__main__ import main


TREE = {
    "jax": jnp.arange(6, dtype=jnp.float32).reshape(2, 3),
    "half": jnp.ones(3, jnp.bfloat16),
    "numpy": np.arange(4.0),
    "scalar": np.float32(2.5),
    "zero": jnp.float32(7),
    "none": jnp.zeros((0, 2)),
    "key": jax.random.key(3),
    "int": 5,
    "float": 2.5,
    "flag": True,
}
FORMATS = {
    "safetensors": TREE,
    "npz": {name: leaf for name, leaf in TREE.items() if name != "half"},
    "flax": TREE,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("format", FORMATS)
def test_what_came_back_differs_in_kinds_alone(format, tmp_path, capsys):
    if format == "flax":
        pytest.importorskip("flax")
    tree = FORMATS[format]
    ckpt, file, back = (str(tmp_path / name) for name in ("ckpt", "file", "back"))
    eqx_ckpt.tree_serialise_leaves(ckpt, tree)
    getattr(interop, f"to_{format}")(ckpt, file)
    source = getattr(interop, f"open_{format}")(file)
    eqx_ckpt.copy(source, back)
    assert eqx_ckpt.inspect.diff(ckpt, back).keys() >= {"key"}
    for other in (source, back):
        assert eqx_ckpt.inspect.diff(ckpt, other, values=True, kinds=False) == {}
        assert eqx_ckpt.inspect.diff(other, ckpt, values=True, kinds=False) == {}
    assert main(["diff", ckpt, back]) == 1
    assert main(["diff", ckpt, back, "--only-values"]) == 0
    capsys.readouterr()
    # Each leaf by itself is told from what is not equal.
    for name, leaf in tree.items():
        if np.size(leaf) == 0:
            continue
        changed = tree | {name: _changed(leaf)}
        eqx_ckpt.tree_serialise_leaves(ckpt, changed, overwrite=True)
        found = eqx_ckpt.inspect.diff(ckpt, back, values=True, kinds=False)
        assert found.keys() == {name}
        assert main(["diff", ckpt, back, "--only-values", "--json"]) == 1
        said = json.loads(capsys.readouterr().out)
        assert [entry["name"] for entry in said["leaves"]] == [name]
        shown = dataclasses.asdict(found[name])
        if shown["norm_rel"] == np.inf:
            shown["norm_rel"] = "inf"
        assert said["leaves"][0].items() <= (shown | {"name": name}).items()


def _changed(leaf):
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(4)
    return leaf + 1


def test_numbers_are_compared_whatever_their_kind(tmp_path):
    """Without `values` too: they are in the manifest."""
    ours = {"same": 2.0, "other": 3.0, "whole": 2, "huge": 2**70, "nan": float("nan")}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "a", ours)
    theirs = {name: np.float64(value) for name, value in ours.items()}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", theirs | {"other": np.float64(4)})
    assert eqx_ckpt.inspect.diff(tmp_path / "a", tmp_path / "b").keys() == {*ours}
    found = eqx_ckpt.inspect.diff(tmp_path / "a", tmp_path / "b", kinds=False)
    assert {name: leaf.status for name, leaf in found.items()} == {
        "other": "different values",
        "whole": "different type",
        "huge": "different type",
    }
    assert (found["other"].count, found["other"].max_abs) == (1, 1.0)


def test_damage_is_an_error_that_names_each_leaf(tmp_path):
    for name in ("a", "b"):
        eqx_ckpt.tree_serialise_leaves(tmp_path / name, {"w": np.ones(3), "v": 1})
    chunk = tmp_path / "b/w/c.0"
    chunk.write_bytes(chunk.read_bytes()[::-1])
    assert eqx_ckpt.inspect.diff(tmp_path / "a", tmp_path / "b") == {}
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'w'"):
        eqx_ckpt.inspect.diff(tmp_path / "a", tmp_path / "b", values=True)
