"""A leaf has one name: the same text in every place where a person meets it."""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import eqx_ckpt
from eqx_ckpt.__main__ import main
from helpers import assert_same, files_below, structs


_LONG = "Very long" * 50
_CUT = "Very%20long" * 50
# Keys, many of which differ only by case, and what becomes of them.
PLAIN = {key: key for key in ("W", "w", "Wq", "wq", "wQ", "Attn", "attn", "+a=b,-")}
KEYS = PLAIN | {
    "a.B": "a.B",
    "A.b": "A.b",
    "a/B": "a%2FB",
    "A/B": "A%2FB",
    "a//": "a%2F%2F",
    "%57q": "%2557q",
    "é": "%C3%A9",
    "É": "%C3%89",
    "e\u0301": "e%CC%81",
    "\ud800": "%ED%A0%80",
    "": "@empty",
    "@root": "%40root",
    "@empty": "%40empty",
    "0": "%30",
    "con": "%63on",
    "CON": "%43ON",
    _LONG: f"{_CUT[:167]}@{hashlib.sha256(_CUT.encode()).hexdigest()[:32]}",
    10**30: str(10**30),
    -1: "-1",
    10**200: f"1{'0' * 166}@{hashlib.sha256(b'1' + b'0' * 200).hexdigest()[:32]}",
}


def some_keys(rng: random.Random, known: dict[Any, str], count: int) -> list[Any]:
    """Keys of one dictionary; JAX sorts strings, or integers."""
    kind = rng.choice([str, str, str, int])
    some = [key for key in known if type(key) is kind]
    some = rng.sample(some, min(count, len(some)))
    twins = [key.swapcase() for key in some if kind is str]
    return [*dict.fromkeys(some + [key for key in twins if key in known])][:count]


def random_tree(rng: random.Random, known: dict[Any, str], depth: int = 0) -> Any:
    if depth == 3 or (depth and rng.random() < 0.4):
        n = rng.randrange(1, 5)
        data = [np.arange(n) / rng.randrange(1, 9), jnp.arange(n) + 0.5, float(n)]
        return rng.choice(data)
    children = [random_tree(rng, known, depth + 1) for _ in range(rng.randrange(1, 6))]
    if depth and rng.random() < 0.2:
        return children
    keys = some_keys(rng, known, len(children))
    return dict(zip(keys, children[: len(keys)], strict=True)) or {"w": 1.0}


def nodes(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every node, with the name that it is expected to have."""
    yield name, tree
    if isinstance(tree, dict):
        texts = [(KEYS.get(key, str(key)), child) for key, child in tree.items()]
    elif isinstance(tree, list):
        texts = [(str(i), child) for i, child in enumerate(tree)]
    else:
        return
    for text, child in texts:
        yield from nodes(child, f"{name}/{text}" if name else text)


def is_leaf(node: Any) -> bool:
    return not isinstance(node, dict | list)


PLAIN_SEEDS = (0, 1, 2)
TREES = {
    seed: random_tree(random.Random(seed), PLAIN if seed in PLAIN_SEEDS else KEYS)
    for seed in range(9)
}
MEMORY = "memory://one-name"


@pytest.fixture(params=TREES)
def seed(request) -> int:
    return request.param


@pytest.fixture
def tree(seed) -> Any:
    return TREES[seed]


@pytest.fixture
def expected(tree) -> dict[str, Any]:
    """Each leaf by its name."""
    return {name: node for name, node in nodes(tree) if is_leaf(node)}


@pytest.fixture
def arrays(expected) -> set[str]:
    return {name for name, leaf in expected.items() if not isinstance(leaf, float)}


@pytest.fixture
def path(tree) -> str:
    eqx_ckpt.tree_serialise_leaves(MEMORY, tree, overwrite=True)
    return MEMORY


def test_a_save_has_one_name_for_each(tree, expected, arrays, tmp_path):
    specs, codecs, done = set(), set(), set()

    def spec(f, leaf):
        specs.add(f.name)
        eqx_ckpt.default_serialise_filter_spec(f, leaf)

    def compression(name, record):
        codecs.add(name)

    def progress(phase, leaf, *_):
        done.add(leaf)

    options = {"compression": compression, "progress": progress}
    place = tmp_path / "new"
    eqx_ckpt.tree_serialise_leaves(place, tree, spec, **options)
    assert specs == {*expected}
    assert codecs == arrays
    assert done - {""} == arrays
    assert {*eqx_ckpt.inspect.read_manifest(place).leaves} == {*expected}
    # So it does on the disk.
    folders = {file.rpartition("/")[0] for file in files_below(place)}
    assert folders - {""} == arrays
    for layout in ("ocdbt", "zarr"):
        eqx_ckpt.copy(place, MEMORY, layout=layout, overwrite=True)
        assert {*eqx_ckpt.inspect.read_manifest(MEMORY).leaves} == {*expected}
        assert_same(eqx_ckpt.tree_deserialise_leaves(MEMORY, tree), tree)


def test_a_restore_has_one_name_for_each(tree, expected, arrays, path):
    specs, done, places, kept = set(), set(), set(), set()

    def spec(f, leaf):
        specs.add(f.name)
        return eqx_ckpt.default_deserialise_filter_spec(f, leaf)

    def progress(phase, leaf, *_):
        done.add(leaf)

    def sharding(name, struct):
        places.add(name)
        return SingleDeviceSharding(jax.devices()[0])

    def keep(name):
        kept.add(name)
        return "keep"

    restore = eqx_ckpt.tree_deserialise_leaves
    assert_same(restore(path, tree, spec, progress=progress), tree)
    assert specs == {*expected}
    assert done - {""} == arrays
    like = structs(tree)
    restore(path, like, sharding=sharding)
    of_jax = {n for n in arrays if isinstance(expected[n], jax.Array)}
    assert of_jax <= places <= {*expected}
    places.clear()
    eqx_ckpt.shard_like(like, sharding)
    assert of_jax <= places <= {*expected}
    eqx_ckpt.tree_serialise_leaves("memory://nothing", {}, overwrite=True)
    assert_same(restore("memory://nothing", tree, missing=keep), tree)
    assert kept == {*expected}
    kept.clear()
    restore(path, {}, unexpected=lambda name: kept.add(name) or "ignore")
    assert kept == {*expected}
    assert {*eqx_ckpt.tree_match(path, tree).leaves} == {*expected}
    found = eqx_ckpt.tree_match(path, tree, transform=lambda old: old)
    assert {*found.leaves} == {*expected}
    assert found.ok
    wrong = jax.tree.map(lambda x: np.zeros((7, 7)), tree)
    with pytest.raises(eqx_ckpt.LeafMismatchError) as e:
        restore(path, wrong)
    assert all(repr(name) in str(e.value) for name in [*expected][:10])


def test_a_prefix_is_the_name_of_a_node(tree, expected, path):
    for name, node in itertools.islice(nodes(tree), 15):
        if not is_leaf(node) and not node:
            continue
        below = {n for n in expected if n == name or n.startswith(f"{name}/")}
        below = below if name else {*expected}
        names = {
            found: value for found, _, value in eqx_ckpt.inspect.iter_leaves(path, name)
        }
        assert {*names} == below == {*eqx_ckpt.inspect.stats(path, name)}
        assert_same(
            [np.asarray(value) for _, value in sorted(names.items())],
            [np.asarray(expected[n]) for n in sorted(below)],
        )
        assert_same(eqx_ckpt.tree_deserialise_leaves(path, node, prefix=name), node)
        like = eqx_ckpt.tree_like(path, prefix=name)
        restored = eqx_ckpt.tree_deserialise_leaves(path, like, prefix=name)
        same = {n for n, leaf in nodes(restored) if is_leaf(leaf)}
        assert {f"{name}/{n}".strip("/") if n else name for n in same} == below
        specs = set()
        eqx_ckpt.tree_deserialise_leaves(
            path, node, lambda f, leaf, s=specs: s.add(f.name) or leaf, prefix=name
        )
        assert specs == below


def test_a_state_dict_has_the_same_names(tree, expected):
    state, names = eqx_ckpt.interop.to_state_dict(tree), set()
    assert {name for name, node in nodes(state) if is_leaf(node)} == {*expected}
    assert_same(eqx_ckpt.interop.from_state_dict(tree, state), tree)
    eqx_ckpt.interop.from_state_dict(
        {}, state, unexpected=lambda n: names.add(n) or "ignore"
    )
    assert names == {*expected}


def test_the_command_line_has_the_same_names(tree, expected, path, tmp_path, capsys):
    place = str(tmp_path / "new")
    eqx_ckpt.copy(path, place)

    def ask(*arguments: str) -> tuple[int, Any]:
        command, *others = arguments
        status = main([command, "--json", *others])
        return status, json.loads(capsys.readouterr().out)

    names = {leaf["name"] for leaf in ask("tree", place)[1]["leaves"]}
    assert names == {*expected}
    for name, value in [*expected.items()][:5]:
        status, shown = ask("show", place, "--", name)
        assert (status, shown["name"]) == (0, name)
        assert shown["values"] == np.asarray(value).tolist()
    changed = jax.tree.map(lambda x: x + 1, tree)
    other = str(tmp_path / "other")
    eqx_ckpt.tree_serialise_leaves(other, changed)
    status, found = ask("diff", place, other, "--values")
    assert {leaf["name"] for leaf in found["leaves"]} == {*expected}


# Other formats have other names for the other keys.
@pytest.mark.parametrize("seed", PLAIN_SEEDS, indirect=True)
@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_an_export_of_plain_names_differs_in_nothing(tree, format, tmp_path):
    arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    place = str(tmp_path / "new")
    eqx_ckpt.tree_serialise_leaves(place, arrays)
    file = tmp_path / f"file.{format}"
    getattr(eqx_ckpt.interop, f"to_{format}")(place, file)
    assert main(["diff", place, str(file), "--values"]) == 0
    source = getattr(eqx_ckpt.interop, f"open_{format}")(file)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, arrays), arrays)


def test_a_manager_and_a_recording_have_the_same_names(
    tree, expected, arrays, tmp_path
):
    with eqx_ckpt.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, tree).result()
        assert {*eqx_ckpt.inspect.read_manifest(tmp_path / "run/000001").leaves} == {
            *expected
        }
        assert_same(manager.restore(tree), tree)
    sample = jax.tree.map(np.asarray, tree)
    codecs = set()
    with eqx_ckpt.recording.Recording(
        tmp_path / "new",
        sample,
        compression=lambda name, record: codecs.add(name),
    ) as recording:
        recording.extend(jax.tree.map(lambda x: x[None], sample))
    assert (
        codecs
        == {*eqx_ckpt.inspect.read_manifest(tmp_path / "new").leaves}
        == {*expected}
    )
    for name, _, value in eqx_ckpt.inspect.iter_leaves(tmp_path / "new"):
        np.testing.assert_array_equal(value[0], np.asarray(expected[name]))
