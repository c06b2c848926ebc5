"""What Equinox, Orbax, flax and safetensors do, as the page `comparison.md` says it."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec


pytestmark = pytest.mark.filterwarnings("default")
ocp = pytest.importorskip("orbax.checkpoint")
flax = pytest.importorskip("flax.serialization")
safetensors = pytest.importorskip("safetensors")
tensors = pytest.importorskip("safetensors.numpy")


@pytest.fixture
def sharding():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec("x"))


def test_equinox_restores_the_first_leaves_and_no_later_one(tmp_path):
    first, second = jnp.arange(3.0), jnp.ones((8, 2))
    eqx.tree_serialise_leaves(tmp_path / "a", (first, second))
    (found,) = eqx.tree_deserialise_leaves(tmp_path / "a", (first,))
    assert found.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="changed shape"):
        eqx.tree_deserialise_leaves(tmp_path / "a", (second,))


def test_equinox_restores_onto_one_device_or_by_a_filter_spec(tmp_path, sharding):
    like = jax.device_put(jnp.arange(16.0), sharding)
    eqx.tree_serialise_leaves(tmp_path / "a", like)
    assert len(eqx.tree_deserialise_leaves(tmp_path / "a", like).devices()) == 1

    def placed(f, x):
        return jax.device_put(eqx.default_deserialise_filter_spec(f, x), x.sharding)

    found = eqx.tree_deserialise_leaves(tmp_path / "a", like, placed)
    assert found.sharding == sharding


def test_equinox_takes_any_names_and_stacks_nothing(tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "a", {"old": [jnp.zeros(2), jnp.ones(2)]})
    found = eqx.tree_deserialise_leaves(tmp_path / "a", {"new": [jnp.ones(2)] * 2})
    assert [x.tolist() for x in found["new"]] == [[0, 0], [1, 1]]
    with pytest.raises(RuntimeError, match="changed shape"):
        eqx.tree_deserialise_leaves(tmp_path / "a", {"new": jnp.ones((2, 2))})


VERBS = {
    "equinox": (eqx.tree_serialise_leaves, eqx.tree_deserialise_leaves),
    "flax": (
        lambda path, tree: path.write_bytes(flax.to_bytes(tree)),
        lambda path, like: flax.from_bytes(like, path.read_bytes()),
    ),
    "safetensors": (
        lambda path, tree: tensors.save_file(tree, path),
        lambda path, like: tensors.load_file(path),
    ),
}


@pytest.mark.parametrize("library", VERBS)
def test_a_save_has_written_one_whole_file_when_it_returns(tmp_path, library):
    """Nothing is left to the background, to a later step or in an earlier file."""
    save, restore = VERBS[library]
    tree = {"unchanged": np.ones((64, 64)), "step": np.zeros(1)}
    for step in (1.0, 2.0):
        save(tmp_path / "run.file", {**tree, "step": np.full(1, step)})
        (file,) = tmp_path.iterdir()
        assert file.stat().st_size > tree["unchanged"].nbytes
        assert restore(file, tree)["step"] == step


def test_orbax_lists_all_names(tmp_path):
    tree = {"a": jnp.ones(16), "b": jnp.ones((8, 2)), "old": {"c": jnp.ones(3)}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", tree)
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match="do not match") as names:
            checkpointer.restore(tmp_path / "a", {"a": tree["a"], "new": tree["b"]})
    assert all(f"\n{name}:\n" in str(names.value) for name in ("b", "old", "new"))


def test_flax_lists_the_names_of_one_dictionary_and_no_shape():
    data = flax.to_bytes({"x": {"a": jnp.ones(2)}, "y": {"a": jnp.ones(2)}})
    lacking = {"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(2)}
    with pytest.raises(ValueError, match="do not match") as e:
        flax.from_bytes({"x": lacking, "y": lacking}, data)
    assert all(name in str(e.value) for name in ("'b'", "'c'", "/x"))
    assert "/y" not in str(e.value)
    found = flax.from_bytes({"x": {"a": jnp.ones(9)}}, data)
    assert found["x"]["a"].shape == (2,)


def test_flax_needs_all_of_the_bytes():
    data = flax.to_bytes({"a": jnp.ones(2), "b": jnp.ones(2)})
    with pytest.raises(ValueError, match="incomplete"):
        flax.msgpack_restore(data[:-1])


def test_flax_restores_numpy_arrays_from_sharded_ones(sharding):
    like = {"w": jax.device_put(jnp.arange(16.0), sharding)}
    found = flax.from_bytes(like, flax.to_bytes(like))
    assert type(found["w"]) is np.ndarray
    assert np.array_equal(found["w"], like["w"])


def test_flax_saves_texts_numbers_and_types_that_are_registered():
    class Words:
        def __init__(self, text):
            self.text = text

    tree = {"text": "hi", "number": 3, "words": Words("a b")}
    with pytest.raises(TypeError, match="Words"):
        flax.to_bytes(tree)
    flax.register_serialization_state(
        Words, lambda x: {"text": x.text}, lambda x, state: Words(state["text"])
    )
    like = {"text": "", "number": 0, "words": Words("")}
    found = flax.from_bytes(like, flax.to_bytes(tree))
    assert (found["text"], found["number"], found["words"].text) == ("hi", 3, "a b")


def test_flax_and_safetensors_restore_dictionaries_to_rename_and_stack(tmp_path):
    layers = [np.zeros(2), np.ones(2)]
    state = flax.msgpack_restore(flax.to_bytes({"layers": layers}))["layers"]
    found = flax.from_state_dict({"new": layers}, {"new": state})
    assert np.array_equal(found["new"], layers)
    tensors.save_file({f"layers.{i}": x for i, x in enumerate(layers)}, tmp_path / "a")
    for names in (state, tensors.load_file(tmp_path / "a")):
        assert np.array_equal(np.stack([names[k] for k in sorted(names)]), layers)


def test_safetensors_reads_slices_which_jax_can_place_on_a_mesh(tmp_path, sharding):
    w = np.arange(32, dtype=np.float32).reshape(16, 2)
    tensors.save_file({"w": w, "unread": w}, tmp_path / "a")
    with safetensors.safe_open(tmp_path / "a", framework="numpy") as file:
        part = file.get_slice("w")
        assert np.array_equal(part[2:4, :1], w[2:4, :1])
        found = jax.make_array_from_callback(w.shape, sharding, lambda i: part[i])
    assert found.sharding == sharding
    assert np.array_equal(found, w)
