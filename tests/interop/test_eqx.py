"""Files of Equinox, written by Equinox."""

import json
import os
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import interop
from helpers import assert_same, structs


def everything(key):
    return {
        "model": eqx.nn.MLP(2, 3, 8, 2, key=key),
        "bf16": jnp.ones(3, jnp.bfloat16),
        "fp8": jnp.ones(3, jnp.float8_e4m3fn),
        "int4": jnp.ones(3, jnp.int4),
        "numpy": np.ones((2, 3)),
        "numpy bf16": np.ones(2, jnp.bfloat16),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalar": np.float32(3),
        "numbers": [True, 3, 2**64 - 1, -(2**63), 2.5, 1j],
        "empty": jnp.zeros((0, 2)),
    }


def test_what_equinox_wrote(tmp_path, getkey):
    tree = everything(getkey())
    eqx.tree_serialise_leaves(tmp_path / "a.eqx", tree)
    for path in (tmp_path / "a.eqx", str(tmp_path / "a")):
        source = interop.open_eqx(path, tree)
        assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)
    assert source.manifest.metadata is None
    eqx_ckpt.inspect.verify(source)


def test_a_skeleton(tmp_path, getkey):
    tree = everything(getkey())
    eqx.tree_serialise_leaves(tmp_path / "a.eqx", tree)
    skeleton = structs(tree)
    source = interop.open_eqx(tmp_path / "a.eqx", skeleton)
    found = eqx_ckpt.tree_deserialise_leaves(source, skeleton)
    assert_same(found["model"], tree["model"])
    # The skeleton says `float32`, and the file has `float64`, which JAX has not.
    assert_same(found["numpy"], tree["numpy"])


def test_lines_before_the_leaves(tmp_path, getkey):
    model = eqx.nn.MLP(2, 3, 8, 2, key=getkey())
    with open(tmp_path / "a.eqx", "wb") as f:
        f.write((json.dumps({"width": 8}) + "\n").encode())
        eqx.tree_serialise_leaves(f, model)
    source = interop.open_eqx(tmp_path / "a.eqx", model)
    assert source.manifest.metadata == {"width": 8}
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, model), model)


HEADERS = [
    (b'{"width": 8}\n', {"width": 8}),
    (b'{\n  "sizes": [2, {"deep": null}],\n  "name": "\xc3\xa4"\n}\n', None),
    (b"[1, 2.5, true]\n", [1, 2.5, True]),
    (b'{"a": 1, "a": 2}\n', '{"a": 1, "a": 2}\n'),
    (b'{"a": 1}\n{"b": 2}\n', '{"a": 1}\n{"b": 2}\n'),
    (b"8\n", "8\n"),
    (b"width: 8\n", "width: 8\n"),
    (b"[" * 5000 + b"]" * 5000 + b"\n", "[" * 5000 + "]" * 5000 + "\n"),
    (b'{"@float": "nan"}\n', '{"@float": "nan"}\n'),
]


@pytest.mark.parametrize(("header", "expected"), HEADERS)
@pytest.mark.parametrize("lines", [True, False])
def test_like_is_a_function_of_the_header(tmp_path, getkey, header, expected, lines):
    seen = []
    expected = json.loads(header) if expected is None else expected
    model = eqx.nn.MLP(2, 3, 8, 2, key=getkey())

    def make(header):
        seen.append(header)
        return eqx.nn.MLP(2, 3, 8, 2, key=jax.random.key(0))

    with open(tmp_path / "a.eqx", "wb") as f:
        f.write(header)
        eqx.tree_serialise_leaves(f, model)
    how = {"header_lines": header.count(b"\n")} if lines else {}
    source = interop.open_eqx(tmp_path / "a.eqx", make, **how)
    assert seen == [expected]
    assert source.manifest.metadata == expected
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, model), model)
    # A module can be called, too, and other PyTrees.
    again = interop.open_eqx(tmp_path / "a.eqx", model)
    assert again.manifest == source.manifest
    partial = interop.open_eqx(tmp_path / "a.eqx", jtu.Partial(len, model))
    assert partial.manifest.metadata == expected
    if not lines:
        eqx_ckpt.interop.convert(
            tmp_path / "a.eqx", tmp_path / "c", to="checkpoint", format="eqx", like=make
        )
        assert eqx_ckpt.inspect.read_manifest(tmp_path / "c").metadata == expected


def test_functions_of_headers_that_fail(tmp_path, getkey):
    model = eqx.nn.MLP(2, 3, 8, 2, key=getkey())
    eqx.tree_serialise_leaves(tmp_path / "a.eqx", model)
    with pytest.raises(eqx_ckpt.CheckpointError, match="has no lines before"):
        interop.open_eqx(tmp_path / "a.eqx", lambda header: model)
    with open(tmp_path / "b.eqx", "wb") as f:
        f.write(b'{"width": 8}\n')
        eqx.tree_serialise_leaves(f, model)
    with pytest.raises(eqx_ckpt.CheckpointError, match=r"KeyError.*\{\"width\": 8\}"):
        interop.open_eqx(tmp_path / "b.eqx", lambda header: header["depth"])
    with pytest.raises(eqx_ckpt.CheckpointError, match="in the order of a PyTree"):
        interop.convert(model_at := tmp_path / "b.eqx", model_at, to="eqx", like=len)
    source = interop.open_eqx(tmp_path / "b.eqx", model)
    with pytest.raises(ValueError, match="`format`"):
        interop.convert(source, tmp_path / "c", to="checkpoint", format="eqx")


def test_a_part_by_its_name(tmp_path, getkey):
    tree = everything(getkey())
    eqx.tree_serialise_leaves(tmp_path / "a.eqx", tree)
    source = interop.open_eqx(tmp_path / "a.eqx", tree)
    layer = eqx_ckpt.tree_deserialise_leaves(
        source, tree["model"].layers[1], prefix="model/layers/1"
    )
    assert_same(layer, tree["model"].layers[1])


def test_a_filter_spec_that_skips(tmp_path, getkey):
    tree = {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(4)}

    def skip(f, leaf):
        return leaf

    eqx.tree_serialise_leaves(
        tmp_path / "a.eqx",
        tree,
        {"a": eqx.default_serialise_filter_spec, "b": skip, "c": skip},
    )
    spec = {"a": eqx.default_deserialise_filter_spec, "b": skip, "c": skip}
    source = interop.open_eqx(tmp_path / "a.eqx", tree, spec)
    assert source.manifest.leaves.keys() == {"a"}
    found = eqx_ckpt.tree_deserialise_leaves(source, {"a": jnp.zeros(2)})
    assert_same(found, {"a": tree["a"]})


def test_a_filter_spec_that_reads_equal_numbers(tmp_path):
    """They are the same object in Python, and are in the file all the same."""
    tree = {"n": 7, "flag": True, "rate": 0.5, "skipped": 8, "w": jnp.ones(2)}

    def write(f, leaf):
        if leaf != 8:
            f.write(f"{leaf!r}\n".encode())

    def read(f, leaf):
        if leaf == 8:
            return leaf
        found = f.readline().decode().strip()
        return type(leaf)(found == "True" if found in ("True", "False") else found)

    spec = {name: read for name in tree} | {"w": eqx.default_deserialise_filter_spec}
    save = {name: write for name in tree} | {"w": eqx.default_serialise_filter_spec}
    eqx.tree_serialise_leaves(tmp_path / "x.eqx", tree, filter_spec=save)
    source = interop.open_eqx(tmp_path / "x.eqx", tree, spec)
    leaves = source.manifest.leaves
    values = {name: leaf.value for name, leaf in leaves.items() if leaf.value}
    assert values == {"n": "7", "flag": "True", "rate": leaves["rate"].value}
    assert {*leaves} == {"n", "flag", "rate", "w"}
    assert source.manifest.unsaved == {"skipped": "skipped: Python int"}


def test_a_filter_spec_that_writes_something_else(tmp_path):
    tree = {"a": jnp.arange(3.0), "b": jnp.arange(4.0)}

    def write(f, leaf):
        f.write(np.asarray(leaf, np.float16).tobytes())

    def read(f, leaf):
        data = np.frombuffer(f.read(2 * leaf.size), np.float16)
        return jnp.asarray(data, jnp.float32)

    spec = {"a": write, "b": eqx.default_serialise_filter_spec}
    eqx.tree_serialise_leaves(tmp_path / "a.eqx", tree, spec)
    # What a function wrote looks like lines before the first array.
    with pytest.raises(eqx_ckpt.CheckpointError, match=r"a\.eqx"):
        interop.open_eqx(tmp_path / "a.eqx", tree)
    spec = {"a": read, "b": eqx.default_deserialise_filter_spec}
    source = interop.open_eqx(tmp_path / "a.eqx", tree, spec)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)
    spec = {"a": eqx.default_deserialise_filter_spec, "b": read}
    tree = {"a": tree["b"], "b": tree["a"]}
    save = {"a": eqx.default_serialise_filter_spec, "b": write}
    eqx.tree_serialise_leaves(tmp_path / "b.eqx", tree, save)
    source = interop.open_eqx(tmp_path / "b.eqx", tree, spec)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)


def read_line(f, leaf):
    return jnp.asarray(json.loads(f.readline()))


def write_line(f, leaf):
    f.write(json.dumps(leaf.tolist()).encode() + b"\n")


def write_with_header(path, header, tree, spec):
    with open(path, "wb") as f:
        f.write(header)
        eqx.tree_serialise_leaves(f, tree, spec)
    return path


@pytest.mark.parametrize("header", [b"", b"{}\n", b"{}\nof two lines\n"])
def test_text_as_the_first_leaf(tmp_path, header):
    tree = {"a": jnp.arange(3.0), "b": jnp.arange(4.0)}
    save = {"a": write_line, "b": eqx.default_serialise_filter_spec}
    path = write_with_header(tmp_path / "a.eqx", header, tree, save)
    spec = {"a": read_line, "b": eqx.default_deserialise_filter_spec}
    lines = header.count(b"\n")
    source = interop.open_eqx(path, tree, spec, header_lines=lines)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)
    metadata = {b"": None, b"{}\n": {}}.get(header, header.decode())
    assert source.manifest.metadata == metadata
    if header:
        with pytest.raises(eqx_ckpt.CheckpointError, match="pass `header_lines`"):
            interop.open_eqx(path, tree, spec)
    else:
        source = interop.open_eqx(path, tree, spec)
        assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)


def test_lines_before_a_leaf_that_is_skipped(tmp_path):
    tree = {"a": jnp.ones(2), "b": jnp.ones(3)}
    skip, write = lambda f, leaf: leaf, eqx.default_serialise_filter_spec
    path = tmp_path / "a.eqx"
    write_with_header(path, b"{}\n", tree, {"a": skip, "b": write})
    spec = {"a": skip, "b": eqx.default_deserialise_filter_spec}
    source = interop.open_eqx(path, tree, spec)
    assert source.manifest.metadata == {}
    assert source.manifest.leaves.keys() == {"b"}


def test_lines_alone(tmp_path):
    tree = {"activation": jax.nn.relu}
    write = eqx.default_serialise_filter_spec
    path = write_with_header(tmp_path / "a.eqx", b'{"width": 8}\n', tree, write)
    source = interop.open_eqx(path, tree)
    assert source.manifest.metadata == {"width": 8}
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)
    eqx.tree_serialise_leaves(path, {"w": jnp.ones(2)})
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="bytes behind the last leaf"):
        interop.open_eqx(path, tree)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (9, "has 2 lines, and `header_lines` is 9"),
        (0, r"at byte 0, where `\['w'\]` should begin"),
    ],
)
def test_another_number_of_lines(tmp_path, lines, problem):
    write = eqx.default_serialise_filter_spec
    tree = {"w": jnp.arange(2)}
    path = write_with_header(tmp_path / "a.eqx", b"{}\n", tree, write)
    with pytest.raises(eqx_ckpt.CheckpointError, match=problem):
        interop.open_eqx(path, tree, header_lines=lines)


def test_numbers_of_lines_that_are_none(tmp_path):
    tree = {"w": jnp.arange(2)}
    eqx.tree_serialise_leaves(tmp_path / "a.eqx", tree)
    for lines, error in ((-1, ValueError), (True, TypeError)):
        with pytest.raises(error, match=f"`header_lines` is {lines}"):
            interop.open_eqx(tmp_path / "a.eqx", tree, header_lines=lines)


@pytest.mark.parametrize(
    ("like", "problem"),
    [
        ({"a": jnp.zeros(2), "b": jnp.zeros((4, 3))}, r"`\['b'\]`: float32\[4, 3\]"),
        ({"a": jnp.zeros(2), "b": jnp.zeros((3, 4), int)}, "dtypes differ"),
        ({"a": jnp.zeros(2), "b": 3.0}, "shapes differ"),
        ({"a": jnp.zeros(2)}, "bytes behind the last leaf"),
        ({"a": jax.random.key(0), "b": jnp.zeros((3, 4))}, r"`\['a'\]`: PRNG key"),
    ],
)
def test_the_first_leaf_that_differs(tmp_path, like, problem):
    tree = {"a": jnp.zeros(2), "b": jnp.zeros((3, 4))}
    eqx.tree_serialise_leaves(tmp_path / "a.eqx", tree)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match=problem):
        interop.open_eqx(tmp_path / "a.eqx", like)


def test_a_tree_of_one_leaf_that_differs(tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "a.eqx", jnp.ones(3))
    with pytest.raises(
        eqx_ckpt.LeafMismatchError, match="differs from `like` is `@root`"
    ):
        interop.open_eqx(tmp_path / "a.eqx", jnp.ones(4))


def test_a_number_of_another_type(tmp_path):
    eqx.tree_serialise_leaves(tmp_path / "a.eqx", {"n": 3})
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="types differ"):
        interop.open_eqx(tmp_path / "a.eqx", {"n": 3.0})


def test_broken_files(tmp_path):
    tree = {"a": jnp.zeros(2), "b": jnp.zeros((3, 4))}
    path = tmp_path / "a.eqx"
    eqx.tree_serialise_leaves(path, tree)
    data = path.read_bytes()
    for content, problem in {
        data[:-1]: r"ends within the leaf `\['b'\]`",
        data[:200]: r"where `\['b'\]` should begin",
        b"": r"where `\['a'\]` should begin",
        data.replace(b"'<f4',", b"'|O', "): "pickled",
        b"\xff\n" + data: "not text",
        b"no arrays": r"byte 9, where `\['a'\]` should begin",
    }.items():
        path.write_bytes(content)
        with pytest.raises(eqx_ckpt.CheckpointError, match=problem) as e:
            interop.open_eqx(path, tree)
        assert str(path) in str(e.value)
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
        interop.open_eqx(tmp_path / "b.eqx", tree)


def test_a_file_with_hyperparameters_is_recognised(tmp_path):
    tree = {"w": jnp.ones(3)}
    with open(tmp_path / "model.eqx", "wb") as f:
        f.write(b'{"width": 8}\n')
        eqx.tree_serialise_leaves(f, tree)
    assert_same(
        eqx_ckpt.tree_deserialise_leaves(
            interop.open_source(tmp_path / "model.eqx", like=tree), tree
        ),
        tree,
    )
    with pytest.raises(eqx_ckpt.CheckpointError, match="has no names"):
        interop.open_source(tmp_path / "model.eqx")
    interop.convert(
        tmp_path / "model.eqx", tmp_path / "model", to="checkpoint", like=tree
    )
    metadata = eqx_ckpt.inspect.read_manifest(tmp_path / "model").metadata
    assert metadata == {"width": 8}


@pytest.mark.parametrize("name", ["model", "model.eqx"])
def test_a_file_is_opened_by_the_path_that_was_saved_to(tmp_path, monkeypatch, name):
    """Equinox adds `.eqx`; a file may also have lost it."""
    monkeypatch.chdir(tmp_path)
    tree = {"w": jnp.ones(3)}
    eqx.tree_serialise_leaves("model", tree)
    os.rename("model.eqx", name)
    for source in (
        interop.open_eqx("model", tree),
        interop.open_source("model", like=tree),
    ):
        assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)
    interop.convert("model", "ckpt", to="checkpoint", like=tree)
    assert_same(eqx_ckpt.tree_deserialise_leaves("ckpt", tree), tree)
    with pytest.raises(eqx_ckpt.CheckpointError, match=f"'.*{name}' is a file of Equi"):
        interop.open_source("model")


def test_two_files_that_a_path_may_mean(tmp_path):
    tree = {"w": jnp.ones(3)}
    eqx.tree_serialise_leaves(tmp_path / "model", tree)
    shutil.copy(tmp_path / "model.eqx", tmp_path / "model")
    for open_it in (
        interop.open_eqx,
        lambda path, like: interop.open_source(path, like=like),
    ):
        with pytest.raises(eqx_ckpt.CheckpointError, match="both '.*l' and '.*l.eqx'"):
            open_it(tmp_path / "model", tree)
        open_it(tmp_path / "model.eqx", tree)


def test_what_numpy_makes_of_a_header_stays_numpys(tmp_path):
    days = np.array(["2020-02-29"], "datetime64[D]")
    tree = {"days": days, "many": np.array([2**40 + 1]), "w": jnp.ones(2)}

    with open(tmp_path / "a.eqx", "wb") as f:
        f.write(b'{"width": 2}\n')
        eqx.tree_serialise_leaves(f, tree)
    source = eqx_ckpt.interop.open_eqx(tmp_path / "a.eqx", lambda header: tree)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)
