"""Both verbs do what Equinox's do, but for the differences that the docs list.

What Equinox tests of its own (its `tests/test_serialisation.py`), with its verbs and
with ours.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt


DOCS = Path(__file__).parents[2] / "docs"
nn = eqx.nn


@pytest.fixture(params=[eqx, eqx_ckpt], ids=["equinox", "eqx_ckpt"])
def verbs(request, tmp_path):
    """How to save and to restore one tree, by Equinox or by this package."""
    path = tmp_path / "tree"

    def save(tree, *args):
        request.param.tree_serialise_leaves(path, tree, *args)

    def restore(like, *args):
        return request.param.tree_deserialise_leaves(path, like, *args)

    return save, restore


def relu(x):
    return x


def gelu(x):
    return x


def arrays(i):
    return (
        jnp.array(1 + i),
        jnp.array([1.0, 2.0]) + i,
        np.array(1 + i),
        np.array([1.0, 2.0]) + i,
    )


def scalars(i):
    return (i == 0, 1 + i, 1.0 + i, 1 + 1j + i)


def test_what_is_no_data_stays_that_of_like(verbs):
    save, restore = verbs
    old, new = object(), object()
    save((arrays(0), scalars(0), relu, old))
    *data, function, thing = restore((arrays(5), scalars(5), gelu, new))
    assert eqx.tree_equal(data, [arrays(0), scalars(0)], typematch=True)
    assert function is gelu
    assert thing is new


def test_a_leaf_by_itself(verbs):
    save, restore = verbs
    save(1e-8)
    assert restore(0.0) == 1e-8


@pytest.mark.parametrize("is_jitted", [False, True])
def test_types_and_values_come_back_exactly(verbs, is_jitted):
    save, restore = verbs
    bfloat16 = jax.dtypes.bfloat16
    tree = jnp.array(1e-8), bfloat16(1e-8), np.float32(1e-8), np.float64(1e-8)
    like = jnp.array(2.0), bfloat16(2), np.float32(2), np.float64(2)
    if is_jitted:  # All of it is JAX's then; and of 32 bits.
        tree, like = tree[:-1], like[:-1]
        save(jax.jit(lambda x: x)(tree))
    else:
        save(tree)
    for a, b in zip(restore(like), tree, strict=True):
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        assert a.item() == b.item()


def test_a_skeleton(verbs):
    save, restore = verbs
    model = nn.MLP(2, 2, 2, 2, key=jax.random.key(0))
    save(model)
    like = eqx.filter_eval_shape(nn.MLP, 2, 2, 2, 2, key=jax.random.key(1))
    assert eqx.tree_equal(restore(like), model, typematch=True)


class Norms(eqx.Module):
    first: nn.BatchNorm
    second: nn.BatchNorm

    def __init__(self):
        self.first = nn.BatchNorm(3, "first", mode="ema")
        self.second = nn.BatchNorm(4, "second", mode="ema")


def test_the_state_of_layers_whose_markers_are_other_objects(verbs):
    save, restore = verbs
    model = Norms()
    state = nn.State(model).set(model.second.ema_first_time_index, jnp.array(False))
    save((model, state))
    other = Norms()
    new, state = restore((other, nn.State(other)))
    assert not state.get(new.second.ema_first_time_index)
    assert state.get(new.first.ema_first_time_index)


def test_a_filter_spec_that_saves_and_restores_otherwise(verbs):
    save, restore = verbs

    def saved(f, x):
        if not isinstance(x, jax.Array):
            eqx.default_serialise_filter_spec(f, x)

    def restored(f, x):
        return relu if callable(x) else eqx.default_deserialise_filter_spec(f, x)

    thing = object()
    save((np.arange(3.0), scalars(0), gelu, thing), saved)
    new = restore((np.zeros(3), scalars(5), gelu, thing), restored)
    assert eqx.tree_equal(new[:2], (np.arange(3.0), scalars(0)))
    assert new[2] is relu
    assert new[3] is thing


@pytest.mark.parametrize(
    "like",
    [
        (jnp.array(2), {"a": jnp.array(2), "b": jnp.array(2)}),
        (jnp.array(2), {"a": jnp.array(2.0)}),
        (jnp.array(2), {"a": jnp.array([2])}),
    ],
    ids=["missing", "dtype", "shape"],
)
def test_what_does_not_match_is_an_error(verbs, like):
    save, restore = verbs
    save((jnp.array(1), {"a": jnp.array(1)}))
    with pytest.raises((RuntimeError, eqx_ckpt.LeafMismatchError)):
        restore(like)


# The differences: the tests are named after the rows of the table in the docs.


def test_difference_file(tmp_path, unchecked):
    """A checkpoint is a directory, whose name is that which is given."""
    eqx.tree_serialise_leaves(tmp_path / "a", 1)
    assert (tmp_path / "a.eqx").is_file()
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", 1)
    assert (tmp_path / "b").is_dir()
    with open(tmp_path / "c", "wb") as f:
        eqx.tree_serialise_leaves(f, 1)
        with pytest.raises(TypeError, match="BufferedWriter"):
            unchecked.tree_serialise_leaves(f, 1)


def test_difference_overwrite(tmp_path):
    """What is there is not overwritten unless you say so."""
    for i in range(2):
        eqx.tree_serialise_leaves(tmp_path / "a", i)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", 0)
    with pytest.raises(eqx_ckpt.CheckpointExistsError):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "b", 1)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", 1, overwrite=True)


def test_difference_names(tmp_path):
    """Leaves are found by their names, not by their positions."""
    tree = {"a": jnp.array(1), "b": jnp.array(2)}
    eqx.tree_serialise_leaves(tmp_path / "a", tree)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", tree)
    renamed = {"b": jnp.array(0), "c": jnp.array(0)}
    new = eqx.tree_deserialise_leaves(tmp_path / "a", renamed)
    assert new == {"b": 1, "c": 2}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'c'"):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "b", renamed)


def test_difference_left_over(tmp_path):
    """What `like` lacks is an error."""
    tree = (jnp.array(1), jnp.array(2))
    eqx.tree_serialise_leaves(tmp_path / "a", tree)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", tree)
    assert eqx.tree_deserialise_leaves(tmp_path / "a", tree[:1]) == tree[:1]
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'1': not in `like`"):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "b", tree[:1])
    new = eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "b", tree[:1], unexpected="ignore"
    )
    assert new == tree[:1]


def test_difference_errors(tmp_path):
    """All leaves that differ are in one `LeafMismatchError`, before a byte is read."""
    tree = {"a": jnp.array(1), "b": jnp.array(2), "c": jnp.array(3)}
    like = {"a": jnp.array(1), "b": jnp.array(2.0), "c": jnp.zeros(3)}
    eqx.tree_serialise_leaves(tmp_path / "a", tree)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", tree)
    with pytest.raises(RuntimeError, match="'b'") as error:
        eqx.tree_deserialise_leaves(tmp_path / "a", like)
    assert "'c'" not in str(error.value)
    with pytest.raises(eqx_ckpt.LeafMismatchError) as mismatch:
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "b", like)
    assert "- 'b': different dtype" in str(mismatch.value)
    assert "- 'c': different shape" in str(mismatch.value)


def test_difference_skipped(tmp_path):
    """A leaf that the `filter_spec` of the save skipped has to be skipped again."""

    def saved(f, x):
        if not isinstance(x, jax.Array):
            eqx.default_serialise_filter_spec(f, x)

    tree = (jnp.array(1), np.array(2))
    eqx.tree_serialise_leaves(tmp_path / "a", tree, saved)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", tree, saved)
    # The second leaf is the first one in Equinox's file.
    assert eqx.tree_deserialise_leaves(tmp_path / "a", (np.array(0),)) == (2,)
    new = eqx_ckpt.tree_deserialise_leaves(tmp_path / "b", tree, missing="keep")
    assert new == tree
    spec = (lambda f, x: x, eqx_ckpt.default_deserialise_filter_spec)
    assert eqx_ckpt.tree_deserialise_leaves(tmp_path / "b", tree, spec) == tree


def test_difference_one_file_each(tmp_path):
    """`f` holds one leaf, and knows its name."""

    def saved(f, x):
        f.write(str(x).ljust(8).encode())
        positions.append(f.tell())

    positions: list[int] = []
    eqx.tree_serialise_leaves(tmp_path / "a", (1, 2), saved)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", (1, 2), saved)
    assert positions == [8, 16, 8, 8]

    def restored(f, x):
        names.append(f.name)
        return int(f.read())

    names: list[str] = []
    assert eqx_ckpt.tree_deserialise_leaves(tmp_path / "b", (0, 0), restored) == (1, 2)
    assert names == ["0", "1"]


def test_difference_numbers(tmp_path):
    """An array becomes a Python number only as far as `casting` allows it."""
    eqx.tree_serialise_leaves(tmp_path / "a", jnp.array(7))
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", jnp.array(7))
    assert eqx.tree_deserialise_leaves(tmp_path / "a", 0) == 7
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="casting='safe'"):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "b", 0)
    assert eqx_ckpt.tree_deserialise_leaves(tmp_path / "b", 0, casting="safe") == 7


def test_difference_skeleton(tmp_path):
    """A `jax.ShapeDtypeStruct` stands for what was saved, a NumPy array included."""
    tree = (np.array([0.1, 0.2]),)
    like = eqx.filter_eval_shape(lambda: (np.array([0.0, 0.0]),))
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", tree)
    (new,) = eqx_ckpt.tree_deserialise_leaves(tmp_path / "b", like)
    assert type(new) is np.ndarray
    assert new.tolist() == [0.1, 0.2]
    eqx.tree_serialise_leaves(tmp_path / "a", tree)
    (new,) = eqx.tree_deserialise_leaves(tmp_path / "a", like)
    assert isinstance(new, jax.Array)


def test_difference_state(tmp_path):
    """State that would be lost is told at the save."""
    tree = {"x": 1, "rng": np.random.default_rng(0)}
    eqx.tree_serialise_leaves(tmp_path / "a", tree)
    with pytest.warns(UserWarning, match="'rng'"):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "b", tree)


def test_the_docs_list_these_differences():
    page = (DOCS / "usage/filter_spec.md").read_text()
    table = page[page.index("## Where it differs from Equinox") :]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    names = [row.split("|")[1].strip().replace(" ", "_") for row in rows]
    tests = [name for name in globals() if name.startswith("test_difference_")]
    assert tests == [f"test_difference_{name}" for name in names]
