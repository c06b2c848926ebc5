"""What a `transform` takes apart, the opposite one puts together again, to the bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqx_ckpt
from helpers import assert_same, structs


DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool", "complex64")
PATHS = [f"memory://round-trips/{i}" for i in range(3)]


@st.composite
def layers(draw: Any) -> list[dict[str, Any]]:
    """Layers that are alike, with a few arrays each."""
    count = draw(st.integers(1, 4))
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, unique=True))
    kinds = {
        name: (
            tuple(draw(st.lists(st.integers(0, 3), max_size=3))),
            draw(st.sampled_from(DTYPES)),
        )
        for name in names
    }
    bits = np.random.default_rng(draw(st.integers(0, 99)))
    return [
        {
            name: jnp.asarray(bits.integers(0, 2, shape)).astype(dtype)
            for name, (shape, dtype) in kinds.items()
        }
        for _ in range(count)
    ]


def stacked(old: Any) -> Any:
    parts = [old["layers"][i] for i in range(len(old["layers"]))]
    return {"blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *parts)}


def apart(old: Any) -> Any:
    count = len(jax.tree.leaves(old["blocks"])[0])
    return {
        "layers": [
            jax.tree.map(lambda x, i=i: x[i], old["blocks"]) for i in range(count)
        ]
    }


@given(layers(), st.integers(0, 3))
@settings(deadline=None, max_examples=15)
def test_stacking_and_unstacking(parts, shift):
    tree = {"layers": parts}
    eqx_ckpt.tree_serialise_leaves(PATHS[0], tree, overwrite=True)
    like = {"blocks": jax.tree.map(lambda *xs: jnp.stack(xs), *parts)}
    found = eqx_ckpt.tree_deserialise_leaves(PATHS[0], structs(like), transform=stacked)
    assert_same(found, like)
    eqx_ckpt.tree_serialise_leaves(PATHS[1], found, overwrite=True)
    again = eqx_ckpt.tree_deserialise_leaves(PATHS[1], structs(tree), transform=apart)
    assert_same(again, tree)

    def rotated(old: Any) -> Any:
        count = len(old["layers"])
        return {"layers": [old["layers"][(i + shift) % count] for i in range(count)]}

    turn = shift % len(parts)
    expected = {"layers": parts[turn:] + parts[:turn]}
    found = eqx_ckpt.tree_deserialise_leaves(
        PATHS[0], structs(expected), transform=rotated
    )
    assert_same(found, expected)


def test_progress_counts_what_is_read():
    tree = {"a": jnp.ones((8, 4)), "b": jnp.ones((8, 4)), "c": jnp.zeros(3)}
    eqx_ckpt.tree_serialise_leaves(PATHS[0], tree, overwrite=True)
    seen: list[tuple[int, int]] = []
    eqx_ckpt.tree_deserialise_leaves(
        PATHS[0],
        {"sum": jnp.zeros((8, 4)), "d": jnp.zeros(3)},
        transform=lambda old: {"sum": old["a"] + old["b"], "d": old["c"]},
        progress=lambda phase, leaf, done, total: seen.append((done, total)),
    )
    assert seen[-1] == (268, 268)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_manager_restores_through_a_transform(tmp_path):
    with eqx_ckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"enc": jnp.arange(3.0), "step": 1})
        found = manager.restore(
            {"encoder": jnp.zeros(3), "step": 0},
            transform=lambda old: {"encoder": old["enc"] * 2, "step": old["step"]},
        )
    assert_same(found, {"encoder": 2 * jnp.arange(3.0), "step": 1})


@pytest.mark.peers
def test_a_file_of_safetensors(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    weights = {
        "h.0.attn.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "h.1.attn.weight": -np.arange(12, dtype=np.float32).reshape(3, 4),
        "head": np.ones(5, np.float32),
    }
    library.save_file(weights, tmp_path / "model.safetensors")
    source = eqx_ckpt.interop.open_safetensors(tmp_path / "model.safetensors")

    def transform(old: Any) -> Any:
        layers = [old["h"][i]["attn"]["weight"].T for i in range(2)]
        return {"layers": jnp.stack(layers)}

    like = jax.ShapeDtypeStruct((2, 4, 3), jnp.float32)
    found = eqx_ckpt.tree_deserialise_leaves(
        source, {"layers": like}, transform=transform
    )
    assert np.array_equal(found["layers"][1], weights["h.1.attn.weight"].T)
