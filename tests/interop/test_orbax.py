"""Checkpoints of Orbax, written by Orbax in several ways."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import eqx_ckpt
from eqx_ckpt import interop
from helpers import assert_same


pytestmark = pytest.mark.filterwarnings("default")
ocp = pytest.importorskip("orbax.checkpoint")

TREE = {
    "a": {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(3, jnp.bfloat16)},
    "list": [jnp.zeros(2), np.arange(3)],
    "int": 3,
    "float": 2.5,
    "k.dot": jnp.ones(()),
    "key": jax.random.key(7),
    "keys": jax.random.split(jax.random.key(7), 3),
    "zeros": jnp.zeros((8, 8)),
}
EXTRA = {"empty": {}, "none": None}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("orbax")
    for name, options in {
        "plain": {"use_ocdbt": False},
        "zarr3": {"use_ocdbt": True, "use_zarr3": True},
        "plain_zarr3": {"use_ocdbt": False, "use_zarr3": True},
    }.items():
        checkpointer = ocp.PyTreeCheckpointer(**options)
        checkpointer.save(root / name, {**TREE, **EXTRA, "text": "hi"})
    with ocp.CheckpointManager(root / "run") as manager:
        for step in (5, 10):
            tree = {**TREE, "int": step}
            items = {"params": tree, "rest": {"x": jnp.ones(2)}}
            manager.save(
                step,
                args=ocp.args.Composite(
                    **{k: ocp.args.StandardSave(v) for k, v in items.items()},
                    meta=ocp.args.JsonSave({"a": 1}),
                ),
            )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(root / "standard", {**TREE, **EXTRA})
    return root


@pytest.mark.parametrize("name", ["plain", "zarr3", "plain_zarr3", "standard"])
def test_what_orbax_wrote(saved, name):
    source = interop.open_orbax(saved / name)
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, TREE), TREE)
    unsaved = {} if name == "standard" else {"text": "a string"}
    assert source.manifest.unsaved == unsaved
    eqx_ckpt.inspect.verify(source)


def test_dictionaries_and_lists_of_orbax_stay_what_they_are(tmp_path):
    """Through a copy, and back to Orbax; and a model of flax has numbered layers."""
    x = jnp.arange(3.0)
    tree = {"layers": {"0": x, "1": x + 1}, "list": [x + 2, {"0": x}], "one": {"0": x}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", tree)
    source = interop.open_orbax(tmp_path / "a")
    assert {"layers/0", "list/1/0"} < {*source.manifest.leaves}
    eqx_ckpt.copy(source, tmp_path / "b")
    interop.to_orbax(tmp_path / "b", tmp_path / "c")
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(tmp_path / "c", tree), tree)
    for path in (source, tmp_path / "b", interop.open_orbax(tmp_path / "c")):
        assert_same(eqx_ckpt.tree_deserialise_leaves(path, tree), tree)
        like = {**tree, "layers": [x, x]}
        found = eqx_ckpt.tree_deserialise_leaves(path, like)
        assert_same(found["layers"], [x, x + 1])


def test_version_1(tmp_path):
    from orbax.checkpoint import v1

    v1.save(tmp_path / "v1", TREE)
    source = interop.open_orbax(tmp_path / "v1")
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, TREE), TREE)


def test_a_run(saved):
    source = interop.open_orbax(saved / "run", item="params")
    found = eqx_ckpt.tree_deserialise_leaves(source, TREE)
    assert_same(found, {**TREE, "int": 10})
    source = interop.open_orbax(saved / "run", step=5, item="params")
    assert eqx_ckpt.tree_like(source)["int"] == 5
    rest = interop.open_orbax(saved / "run" / "10" / "rest")
    assert eqx_ckpt.tree_like(rest)["x"].shape == (2,)
    with pytest.raises(eqx_ckpt.CheckpointError, match="the items 'params', 'rest'"):
        interop.open_orbax(saved / "run")
    with pytest.raises(eqx_ckpt.CheckpointError, match="and not 'meta'"):
        interop.open_orbax(saved / "run", item="meta")
    with pytest.raises(
        eqx_ckpt.CheckpointNotFoundError, match=r"no step 7, but \[5, 10"
    ):
        interop.open_orbax(saved / "run", step=7)


def test_steps_that_were_never_committed(saved, tmp_path):
    shutil.copytree(saved / "run", tmp_path / "run")
    step = tmp_path / "run" / "10"
    metadata = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    metadata["commit_timestamp_nsecs"] = None
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata))
    for mark in step.rglob("commit_success.txt"):
        mark.unlink()
    source = interop.open_orbax(tmp_path / "run", item="params")
    assert eqx_ckpt.tree_like(source)["int"] == 5
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="never committed"):
        interop.open_orbax(step, item="params")
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="no step that was"):
        interop.open_orbax(tmp_path / "run", step=10)
    step.rename(tmp_path / "10.orbax-checkpoint-tmp-3")
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="never committed"):
        interop.open_orbax(tmp_path / "10.orbax-checkpoint-tmp-3")


@pytest.mark.parametrize("names", [("net_1", "net_2"), ("0", "1")])
def test_items_that_are_named_like_steps(tmp_path, names):
    trees = {name: {"w": jnp.ones(2) * i} for i, name in enumerate(names)}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        manager.save(5, args=ocp.args.Composite(**items))
    for path in (tmp_path / "run", tmp_path / "run" / "5"):
        for name, tree in trees.items():
            found = interop.open_orbax(path, item=name)
            assert_same(eqx_ckpt.tree_deserialise_leaves(found, tree), tree)
        with pytest.raises(
            eqx_ckpt.CheckpointError, match=f"items {', '.join(map(repr, names))}"
        ):
            interop.open_orbax(path)


def test_items_of_a_step_without_a_mark(tmp_path):
    """Old versions of Orbax write no `_CHECKPOINT_METADATA`."""
    trees = {name: {"w": jnp.ones(2) * i} for i, name in enumerate(["net_1", "net_2"])}
    for name, tree in trees.items():
        ocp.PyTreeCheckpointer().save(tmp_path / name, tree)
        (tmp_path / name / "_CHECKPOINT_METADATA").unlink()
    found = interop.open_orbax(tmp_path, item="net_1")
    assert_same(eqx_ckpt.tree_deserialise_leaves(found, trees["net_1"]), trees["net_1"])
    with pytest.raises(
        eqx_ckpt.CheckpointError, match="items 'net_1', 'net_2': .*they are steps"
    ):
        interop.open_orbax(tmp_path)
    # They may be the steps of a run as well.
    found = interop.open_orbax(tmp_path, step=2)
    assert_same(eqx_ckpt.tree_deserialise_leaves(found, trees["net_2"]), trees["net_2"])
    with pytest.raises(
        eqx_ckpt.CheckpointNotFoundError, match=r"no step 3, but \[1, 2"
    ):
        interop.open_orbax(tmp_path, step=3)


def test_a_step_or_an_item_of_an_item(saved):
    with pytest.raises(eqx_ckpt.CheckpointError, match="is one item. Leave out `item`"):
        interop.open_orbax(saved / "run" / "5" / "params", item="rest")
    with pytest.raises(eqx_ckpt.CheckpointError, match="no steps: it is one item"):
        interop.open_orbax(saved / "run" / "5" / "params", step=77)
    with pytest.raises(eqx_ckpt.CheckpointError, match="is one item. Leave out `item`"):
        interop.open_orbax(saved / "standard", item="params")


@pytest.mark.parametrize("prefix", ["my-run_v2", "42", "step"])
def test_prefixes_of_steps(tmp_path, prefix):
    options = ocp.CheckpointManagerOptions(step_prefix=prefix)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (9, 10):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.ones(2) * step}))
    (tmp_path / "logs_11").mkdir()
    (tmp_path / "logs_11" / "log.txt").write_text("no step")
    for source, expected in [
        (interop.open_orbax(tmp_path), 10),
        (interop.open_source(tmp_path), 10),
        (interop.open_orbax(tmp_path, step=9), 9),
    ]:
        tree = {"w": jnp.ones(2) * expected}
        assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)


def test_steps_of_two_prefixes(tmp_path):
    for name in ("a_1", "b_2"):
        ocp.PyTreeCheckpointer().save(tmp_path / name, {"w": jnp.ones(2)})
    with pytest.raises(eqx_ckpt.CheckpointError, match="the prefixes 'a', 'b'"):
        interop.open_orbax(tmp_path)


def test_two_folders_of_one_step(tmp_path):
    for name in ("1", "01"):
        ocp.PyTreeCheckpointer().save(tmp_path / name, {"w": jnp.ones(2)})
    with pytest.raises(eqx_ckpt.CheckpointError, match="twice, as '01' and '1'"):
        interop.open_orbax(tmp_path, step=1)


def test_onto_a_mesh(saved):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    found = eqx_ckpt.tree_deserialise_leaves(
        interop.open_orbax(saved / "zarr3"),
        TREE["zeros"],
        prefix="zeros",
        sharding=sharding,
    )
    assert found.sharding == sharding


def test_a_lost_chunk_is_no_zero(saved, tmp_path):
    """Even though other programs leave out chunks of zeros."""
    shutil.copytree(saved / "plain", tmp_path / "a")
    (tmp_path / "a" / "zeros" / "0.0").unlink()
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'zeros'"):
        eqx_ckpt.tree_deserialise_leaves(interop.open_orbax(tmp_path / "a"), TREE)


NUMBERS = {"zero": 0, "int": 3, "float": 2.5, "flag": True, "w": jnp.arange(2000.0)}


@pytest.mark.parametrize("use_zarr3", [False, True])
@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_a_file_that_is_lost_is_no_zero(tmp_path, use_ocdbt, use_zarr3):
    """Not that of a number either."""
    good, broken = tmp_path / "a", tmp_path / "b"
    checkpointer = ocp.PyTreeCheckpointer(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    checkpointer.save(good, NUMBERS)
    shutil.copytree(good, broken)
    refused = 0
    for file in [path for path in good.rglob("*") if path.is_file()]:
        lost = broken / file.relative_to(good)
        lost.unlink()
        try:
            found = eqx_ckpt.tree_deserialise_leaves(
                interop.open_orbax(broken), NUMBERS
            )
            assert_same(found, NUMBERS)
        except (eqx_ckpt.CorruptCheckpointError, eqx_ckpt.CheckpointNotFoundError):
            refused += 1
        shutil.copy(file, lost)
    assert refused >= (4 if use_ocdbt else 10)


def test_zeros_that_old_versions_left_out(tmp_path):
    tree = {"zero": 0, "w": jnp.zeros(3)}
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(tmp_path / "a", tree)
    metadata = json.loads((tmp_path / "a" / "_METADATA").read_text())
    del metadata["store_array_data_equal_to_fill_value"]
    (tmp_path / "a" / "_METADATA").write_text(json.dumps(metadata))
    for name in tree:
        (tmp_path / "a" / name / "0").unlink()
    assert_same(
        eqx_ckpt.tree_deserialise_leaves(interop.open_orbax(tmp_path / "a"), tree), tree
    )


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("_METADATA", "{", "no JSON"),
        ("_METADATA", "{}", "its tree is not one"),
        ("_METADATA", '{"tree_metadata": {"x": 3}}', "its tree is not one"),
        (
            "array_metadatas/process_0",
            '{"array_metadatas": 3}',
            "its metadata of arrays are not those",
        ),
        ("a.w/.zarray", "[]", "'a.w': its metadata are not those"),
        ("a.w/.zarray", "{}", "'a.w': its metadata are not those"),
        ("a.w/.zarray", None, "'a.w': there is no such array"),
    ],
)
def test_metadata_that_lie(saved, tmp_path, file, text, problem):
    shutil.copytree(saved / "plain", tmp_path / "a")
    (tmp_path / "a" / file).unlink()
    if text is not None:
        (tmp_path / "a" / file).write_text(text)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=problem):
        interop.open_orbax(tmp_path / "a")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("shape", [2**44, 4], "256.0 TiB, and 1 chunks of 48 B are there"),
        ("shape", [2**62, 2**62], "its shape is"),
        ("shape", [2**40, 2**40], "too large"),
        ("shape", [-3, 4], "its shape is"),
        ("shape", [3, True], "its shape is"),
        ("shape", [1] * 40, "its shape is"),
        ("chunks", [2**50, 1], "its chunks"),
        ("chunks", [3], "a different rank"),
        ("dtype", "|O", "its dtype is"),
        ("dtype", [["a", "<f4"]], "its dtype is"),
    ],
)
def test_an_array_that_lies(saved, tmp_path, field, value, problem):
    shutil.copytree(saved / "plain", tmp_path / "a")
    place = tmp_path / "a" / "a.w" / ".zarray"
    metadata = json.loads(place.read_text()) | {field: value}
    place.write_text(json.dumps(metadata))
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=problem):
        interop.open_orbax(tmp_path / "a")


def test_names_that_leave_the_directory(saved, tmp_path):
    shutil.copytree(saved / "plain", tmp_path / "a")
    place = tmp_path / "a" / "_METADATA"
    metadata = place.read_text()
    for key in ("../plain/a", f"{saved}/plain/a", "b/../../plain/a"):
        place.write_text(metadata.replace('"key": "a"', f'"key": "{key}"'))
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="leaves the direct"):
            interop.open_orbax(tmp_path / "a")


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_a_name_that_no_file_can_have(tmp_path, use_ocdbt):
    checkpointer = ocp.PyTreeCheckpointer(use_ocdbt=use_ocdbt)
    checkpointer.save(tmp_path / "a", {"w": np.ones(3)})
    place = tmp_path / "a" / "_METADATA"
    name = "x" * 300
    text = place.read_text().replace('"w"', f'"{name}"').replace("'w'", f"'{name}'")
    place.write_text(text)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="there is no such array"):
        interop.open_orbax(tmp_path / "a")


AWKWARD = {
    "mlp/~/linear_0": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)},
    "above": {"../x": jnp.zeros(2)},
    "": jnp.ones(4),
}
DOTS = {".": jnp.ones(2), "..": jnp.zeros(2), "/absolute": jnp.ones(3)}


@pytest.mark.parametrize("use_zarr3", [False, True])
@pytest.mark.parametrize("use_ocdbt", [False, True])
@pytest.mark.parametrize(
    "tree", [AWKWARD, jnp.arange(3), jax.random.key(1)], ids=["keys", "array", "key"]
)
def test_keys_that_are_paths_or_empty(tmp_path, tree, use_ocdbt, use_zarr3):
    checkpointer = ocp.PyTreeCheckpointer(use_ocdbt=use_ocdbt, use_zarr3=use_zarr3)
    checkpointer.save(tmp_path / "a", tree)
    source = interop.open_orbax(tmp_path / "a")
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, tree), tree)


def test_keys_that_are_dots_in_a_database(tmp_path):
    ocp.PyTreeCheckpointer().save(tmp_path / "a", DOTS)
    source = interop.open_orbax(tmp_path / "a")
    assert_same(eqx_ckpt.tree_deserialise_leaves(source, DOTS), DOTS)


def test_leaves_that_orbax_wrote_to_one_array(tmp_path):
    tree = {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}
    ocp.PyTreeCheckpointer().save(tmp_path / "a", tree)
    with pytest.raises(
        eqx_ckpt.CorruptCheckpointError, match=r"/a' is not .*'a/b' and 'a\.b' to one"
    ):
        interop.open_orbax(tmp_path / "a")


def test_nothing_of_orbax(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="no checkpoint of"):
            interop.open_orbax(path)
