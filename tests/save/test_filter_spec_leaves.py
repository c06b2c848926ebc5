"""A `filter_spec` is called once for each leaf, with the leaf itself."""

import io
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from faults import jobs, specs
from faults.zygote import Zygote
from helpers import assert_same


PATH = "memory://spec_leaves"


def save(tree, spec):
    eqx_ckpt.tree_serialise_leaves(PATH, tree, spec, overwrite=True)
    return eqx_ckpt.inspect.read_manifest(PATH).leaves


def equinox_default(f, x):
    eqx.default_serialise_filter_spec(f, x)


def equinox_default_back(f, x):
    return eqx.default_deserialise_filter_spec(f, x)


@pytest.mark.parametrize(
    "default",
    [eqx_ckpt.default_serialise_filter_spec, eqx.default_serialise_filter_spec],
)
def test_a_spec_is_called_once_with_each_leaf_itself(default):
    tree = {
        "function": jax.nn.relu,
        "jax": jnp.ones(3),
        "numpy": np.ones(3),
        "number": 0.5,
        "scalar": np.float32(1),
        "text": "text",
    }
    seen = []

    def spec(f, x):
        seen.append((f.name, x))
        default(f, x)

    found = save(tree, spec)
    assert [name for name, _ in seen] == sorted(tree)
    assert all(x is tree[name] for name, x in seen)
    assert {name: record.kind for name, record in found.items()} == {
        "jax": "jax",
        "numpy": "numpy",
        "number": "float",
        "scalar": "numpy_scalar",
    }


FROZEN = {"same": jnp.ones(3), "other": jnp.ones(3)}
TESTS = {
    "identity": lambda x: x is FROZEN["same"],
    "set of ids": lambda x: id(x) in {id(FROZEN["same"])},
    "exact type": lambda x: type(x) is np.ndarray,
    "equals a number": lambda x: not np.ndim(x) and bool(x == 0),
    "truth": lambda x: not np.ndim(x) and not x,
    "interface": lambda x: not hasattr(x, "__array__"),
    "dtype": lambda x: getattr(x, "dtype", None) == np.float64,
}


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("writes_bytes", [False, True])
def test_what_a_spec_may_ask_of_a_leaf(name, writes_bytes):
    """It leaves out what it means to, or writes its own bytes for it."""
    chosen = TESTS[name]
    tree = FROZEN | {"host": np.zeros(2), "zero": jnp.zeros(()), "n": 0, "m": 1}

    def spec(f, x):
        if not chosen(x):
            eqx.default_serialise_filter_spec(f, x)
        elif writes_bytes:
            f.write(np.asarray(x).tobytes())

    mine = {key for key, leaf in tree.items() if chosen(leaf)}
    assert 0 < len(mine) < len(tree)
    found = save(tree, spec)
    assert {key for key, r in found.items() if r.kind != "bytes"} == tree.keys() - mine
    assert {key for key, r in found.items() if r.kind == "bytes"} == (
        mine if writes_bytes else set()
    )


def test_a_spec_that_writes_the_npy_file_itself():
    """What comes of it is the same as if it had called the default."""
    tree = {"x": jnp.arange(6.0).reshape(2, 3), "f": np.asfortranarray(np.eye(3))}
    found = save(tree, lambda f, x: np.save(f, np.asarray(x)))
    assert {name: r.kind for name, r in found.items()} == {"x": "jax", "f": "numpy"}
    restored = eqx_ckpt.tree_deserialise_leaves(PATH, tree)
    assert_same(restored, tree)


@pytest.mark.parametrize(
    "write",
    [
        lambda f, x: np.save(f, x + 1),
        lambda f, x: np.save(f, x.astype(np.float64)),
        lambda f, x: np.save(f, x.reshape(3, 2)),
        lambda f, x: np.lib.format.write_array(f, x, version=(2, 0)),
        lambda f, x: [np.save(f, x), np.save(f, x)],
        lambda f, x: [np.save(f, x), f.seek(20), f.write(b"?")],
        lambda f, x: [np.save(f, x), f.truncate(len(f.getvalue()) - 1)],
        lambda f, x: f.write(x.tobytes()),
        lambda f, x: np.savez(f, x=x),
    ],
)
def test_what_is_not_that_file_is_kept_as_it_is(write):
    leaf, expected = np.arange(6, dtype=np.float32).reshape(2, 3), io.BytesIO()
    write(expected, leaf)
    assert save({"x": leaf}, write)["x"].kind == "bytes"
    read = []
    spec = lambda f, x: read.append(f.read())  # noqa: E731
    eqx_ckpt.tree_deserialise_leaves(PATH, {"x": None}, spec, lambda x: x is None)
    assert read == [expected.getvalue()]


@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
@pytest.mark.parametrize(
    "write",
    [lambda f, x: f.write(x.encode()), lambda f, x: f.writelines([x.encode()])],
)
def test_no_byte_is_a_leaf_too(layout, write, tmp_path):
    tree = {"empty": "", "name": "digits"}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", tree, write, layout=layout)
    restored = eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "new", {"empty": "?", "name": "?"}, lambda f, x: f.read().decode()
    )
    assert restored == tree
    eqx_ckpt.inspect.verify(tmp_path / "new")


def test_a_spec_may_close_the_file():
    """`io.TextIOWrapper` does it as soon as nobody refers to it."""

    def spec(f, x):
        with f:
            np.save(f, x) if isinstance(x, np.ndarray) else f.write(x.encode())

    def spec_of_text(f, x):
        io.TextIOWrapper(f, encoding="utf-8").write(x)

    def back(f, x):
        with io.TextIOWrapper(f, encoding="utf-8") as file:
            return file.read()

    array = {"x": np.ones(3)}
    assert save(array, spec)["x"].kind == "numpy"
    assert_same(eqx_ckpt.tree_deserialise_leaves(PATH, array), array)
    save({"name": "ü"}, spec_of_text)
    assert eqx_ckpt.tree_deserialise_leaves(PATH, {"name": ""}, back) == {"name": "ü"}


def test_a_spec_that_writes_when_it_has_returned():
    files = []
    save({"x": 1}, lambda f, x: files.append(f))
    with pytest.raises(ValueError, match="closed"):
        files[0].write(b"late")


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("U3", ["a", "bcd"]), ("S3", [b"a", b"bcd"]), ("f4,i2", [(1, 2), (3, 4)])],
)
def test_dtypes_that_only_npy_files_have(dtype, values):
    leaf = {"x": np.array(values, dtype)}
    with pytest.raises(eqx_ckpt.CheckpointError, match="'x' has the dtype"):
        save(leaf, eqx_ckpt.default_serialise_filter_spec)
    assert save(leaf, equinox_default)["x"].kind == "bytes"
    like = {"x": np.zeros(2, dtype)}
    restored = eqx_ckpt.tree_deserialise_leaves(PATH, like, equinox_default_back)
    assert_same(restored, leaf)


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (np.array([{}]), "has the dtype `object`"),
        (np.ma.array([1], mask=[True]), "is a `MaskedArray`"),
    ],
)
def test_what_equinox_default_would_not_read_again(leaf, words):
    """It pickles the one, and writes the other without its mask."""
    with pytest.raises(eqx_ckpt.CheckpointError, match=f"'x' {words}"):
        save({"x": leaf}, equinox_default)


def test_a_key_cannot_pass_through_equinox_default():
    leaf = {"k": jax.random.key(0)}
    with pytest.raises(eqx_ckpt.CheckpointError, match="'k' cannot be copied.*`eqx_c"):
        save(leaf, equinox_default)
    found = save(leaf, lambda f, x: eqx_ckpt.default_serialise_filter_spec(f, x))
    assert found["k"].kind == "key"
    assert save(leaf, eqx.default_serialise_filter_spec)["k"].kind == "key"


def test_a_deleted_array_cannot_pass_through_equinox_default():
    leaf = jnp.ones(3)
    leaf.delete()
    with pytest.raises(eqx_ckpt.CheckpointError, match="'x' was deleted"):
        save({"x": leaf}, equinox_default)


def test_the_errors_of_a_spec_are_its_own():
    def spec(f, x):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        save({"k": jax.random.key(0)}, spec)


def test_an_array_of_several_processes(zygote: Zygote, disk: pathlib.Path) -> None:
    for found in zygote.call(jobs.values, 2, 4, specs.save_through, str(disk)):
        kind, text = found["equinox"]
        assert kind == "CheckpointError"
        assert "- 'sharded' cannot be copied to this host as a whole" in text
        assert "call `eqx_ckpt.default_serialise_filter_spec`" in text
        assert "replicated" not in text
        assert found["ours"] == ("", "")
    assert [path.name for path in disk.iterdir()] == ["ours"]
