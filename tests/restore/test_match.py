"""Strict: one error with every difference, and the same as data from `match`."""

import ast
import difflib
import functools
import os
import re
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt


PATH = "memory://match"


def save(tree):
    eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)


def test_every_difference_in_one_error():
    save(
        {
            "same": jnp.ones(3),
            "shape": jnp.ones((8, 4)),
            "dtype": jnp.ones(3, jnp.bfloat16),
            "kind": jax.random.key(0),
            "layers": [{"weight": jnp.ones(2), "old_bias": jnp.ones(2)}],
        }
    )
    like = {
        "same": jnp.ones(3),
        "shape": jnp.ones((16, 4)),
        "dtype": jnp.ones(3),
        "kind": jnp.ones(3),
        "layers": [{"weight": jnp.ones(2), "bias": jnp.ones(2)}],
    }
    found = eqx_ckpt.tree_match(PATH, like)
    assert {name: leaf.status for name, leaf in found.leaves.items()} == {
        "same": "same",
        "shape": "shape",
        "dtype": "dtype",
        "kind": "kind",
        "layers/0/weight": "same",
        "layers/0/bias": "missing",
        "layers/0/old_bias": "unexpected",
    }
    assert not found.ok
    assert set(found.problems) == set(found.leaves) - {"same", "layers/0/weight"}
    assert found.leaves["layers/0/bias"].nearest == ("layers/0/old_bias",)
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.tree_deserialise_leaves(PATH, like)
    text = str(error.value)
    for line in [
        "'shape': different shape: float32[16, 4] in `like`, float32[8, 4] in the",
        "'dtype': different dtype: float32[3] in `like`, bfloat16[3] in the checkpoint",
        "'kind': different kind: float32[3] in `like`, PRNG key[] of impl ",
        "'layers/0/bias': float32[2] in `like`, not in the checkpoint. Did you mean "
        "'layers/0/old_bias'?",
        "'layers/0/old_bias': not in `like`, float32[2] in the checkpoint",
        "`filter_spec`",
        "`where`",
    ]:
        assert line in text
        if line.startswith("'"):
            assert line in str(found)
    assert "'same'" not in text


def test_nothing_is_read_when_something_does_not_match(tmp_path):
    eqx_ckpt.tree_serialise_leaves(
        tmp_path / "new", {"a": jnp.ones(3), "b": jnp.ones(3)}
    )
    for chunk in (tmp_path / "new").rglob("c.*"):
        chunk.unlink()
    like = {"a": jnp.ones(3), "b": jnp.ones(4)}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'b'"):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", like)


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (jnp.ones(3), jnp.ones((3, 1))),
        (jnp.ones(1), jnp.ones(())),
        (jnp.ones(3), jnp.ones(3, jnp.float16)),
        (jnp.ones(3, jnp.int32), jnp.ones(3)),
        (np.ones(3), jnp.ones(3)),
        (1, 1.0),
        (1, True),
        (1.0, 1j),
        (1, jnp.ones((), jnp.int32)),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
        (jax.random.key_data(jax.random.key(0)), jax.random.key(0)),
        (jnp.ones(3), jax.nn.relu),
        (jnp.ones(3), "text"),
        (jax.nn.relu, jnp.ones(3)),
    ],
)
def test_nothing_is_cast_padded_or_broadcast(saved, like):
    save({"x": saved})
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'x'"):
        eqx_ckpt.tree_deserialise_leaves(PATH, {"x": like})


def test_another_activation_is_reported_and_does_no_harm(getkey):
    model = eqx.nn.MLP(2, 2, 4, 1, activation=jax.nn.relu, key=getkey())
    like = eqx.nn.MLP(2, 2, 4, 1, activation=jax.nn.gelu, key=getkey())
    save(model)
    found = eqx_ckpt.tree_match(PATH, like)
    assert found.ok
    assert found.leaves["activation"].status == "changed"
    assert "gelu" in str(found)
    assert "relu" in str(found)
    restored = eqx_ckpt.tree_deserialise_leaves(PATH, like)
    assert restored.activation is jax.nn.gelu
    assert eqx_ckpt.tree_match(PATH, model).leaves["activation"].status == "same"


LEAKY = functools.partial(jax.nn.leaky_relu, negative_slope=0.1)


@pytest.mark.parametrize(
    ("now", "status"),
    [
        (functools.partial(jax.nn.leaky_relu, negative_slope=0.1), "same"),
        (functools.partial(jax.nn.leaky_relu, negative_slope=0.2), "changed"),
        (functools.partial(jax.nn.leaky_relu), "changed"),
        (functools.partial(jax.nn.leaky_relu, 0.1), "changed"),
        (functools.partial(jax.nn.relu, negative_slope=0.1), "changed"),
        (functools.partial(LEAKY, 0.1), "changed"),
        (functools.partial(LEAKY, ("x" * 100, LEAKY)), "changed"),
        (functools.partial(LEAKY, 10**5000), "changed"),
    ],
)
def test_arguments_of_an_activation(now, status):
    save({"f": LEAKY, "x": 1})
    found = eqx_ckpt.tree_match(PATH, {"f": now, "x": 1})
    assert found.leaves["f"].status == status
    save({"f": now, "x": 1})
    assert eqx_ckpt.tree_match(PATH, {"f": now, "x": 1}).leaves["f"].status == "same"


def test_long_texts_that_differ_late():
    text = "x" * 10_000
    eqx_ckpt.tree_serialise_leaves("memory://late", {"text": text + "a"})
    assert eqx_ckpt.tree_match("memory://late", {"text": text + "a"}).leaves[
        "text"
    ].status == ("same")
    found = eqx_ckpt.tree_match("memory://late", {"text": text + "b"})
    assert found.leaves["text"].status == "changed"


def test_a_text_that_changed():
    save({"name": "a", "x": 1})
    assert "'name': not saved, and changed: 'b'" in str(
        eqx_ckpt.tree_match(PATH, {"name": "b", "x": 1})
    )


def test_bytes_to_read():
    save({"a": jnp.ones(100), "b": jnp.ones(10, jnp.bfloat16), "n": 5})
    like = {"a": jnp.ones(100), "b": jnp.ones(10, jnp.bfloat16), "n": 0}
    assert eqx_ckpt.tree_match(PATH, like).nbytes == 420
    assert eqx_ckpt.tree_match(PATH, like, where=lambda t: t["b"]).nbytes == 20
    assert eqx_ckpt.tree_match(PATH, like["b"], prefix="b").nbytes == 20


def test_match_of_where_looks_at_nothing_else():
    save({"a": jnp.ones(3), "b": jnp.ones(3)})
    like = {"a": jnp.ones(3), "c": jnp.ones(3)}
    found = eqx_ckpt.tree_match(PATH, like, where=lambda t: t["a"])
    assert found.ok
    assert list(found.leaves) == ["a"]


def blocks(n, attention="attention"):
    block = {attention: {"q": 1, "k": 2}, "mlp": [{"weight": 3, "bias": 4}]}
    return {"blocks": [block] * n}


def error_of(like, **arguments):
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.tree_deserialise_leaves(PATH, like, **arguments)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("like", "line", "way_out"),
    [
        (
            {"model": blocks(250), "step": 1},
            "- 1000 leaves seem to be renamed: 'model/blocks/0/attention/k' in "
            "`like`, 'net/blocks/0/attention/k' in the checkpoint, and so on.",
            "Pass `transform=eqx_ckpt.rename({'net': 'model'})`.",
        ),
        (
            {"net": blocks(250, "attn"), "step": 1},
            "- 500 leaves seem to be renamed: 'net/blocks/0/attn/k' in `like`, "
            "'net/blocks/0/attention/k' in the checkpoint, and so on.",
            "Pass `transform=eqx_ckpt.rename({'attention': 'attn'})`.",
        ),
        (
            {**blocks(250), "step": 1},
            "- 1000 leaves seem to be renamed: 'blocks/0/attention/k' in `like`, "
            "'net/blocks/0/attention/k' in the checkpoint, and so on.",
            "Pass `prefix='net'`.",
        ),
        (
            {"net": {"inner": blocks(250)}, "step": 1},
            "- 1000 leaves seem to be renamed: 'net/inner/blocks/0/attention/k' in "
            "`like`, 'net/blocks/0/attention/k' in the checkpoint, and so on.",
            "Pass `transform=eqx_ckpt.rename({...})`, or restore such a part by "
            "itself, with its name there as `prefix`.",
        ),
    ],
)
def test_a_part_that_was_renamed_is_one_line(like, line, way_out):
    save({"net": blocks(250), "step": 1})
    text = error_of(like)
    assert text[1] == f"{line} {way_out}"
    if said := re.search(r"rename\((\{'.*\})\)", way_out):
        to_like = eqx_ckpt.rename(ast.literal_eval(said[1]))
        found = eqx_ckpt.tree_deserialise_leaves(PATH, like, transform=to_like)
        assert found == jax.tree.map(lambda x: x, like)
    assert not any(other.startswith("-") for other in text[2:])
    found = eqx_ckpt.tree_match(PATH, like)
    renamed = [leaf for leaf in found.leaves.values() if leaf.status == "missing"]
    assert len(found.problems) == 2 * len(renamed)
    assert len({leaf.nearest for leaf in renamed}) == len(renamed)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("prefix", ["", "run"])
def test_a_list_that_has_grown(start, prefix):
    saved = {"w": jnp.ones(2), "log": [float(i) for i in range(30)], "pairs": [(1, 2)]}
    save({"run": saved} if prefix else saved)
    like = saved | {"log": [0.0] * start, "pairs": [(1, 2)] * min(start, 1)}
    text = error_of(like, prefix=prefix)
    name = "run/log" if prefix else "log"
    assert text[-1].startswith(f"{name!r} has 30 entries in the checkpoint, and fewer")
    assert sum("entries in the checkpoint" in line for line in text) == 1
    # Both ways that it names.
    log = eqx_ckpt.load(PATH, name)
    assert log == saved["log"]
    like = like | {"log": [0.0] * 30, "pairs": [(0, 0)]}
    found = eqx_ckpt.tree_deserialise_leaves(PATH, like, prefix=prefix)
    assert found["log"] == log


def test_many_leaves_of_one_kind_do_not_hide_the_others():
    letters = [f"a{chr(ord('a') + i % 26) * (i // 26 + 1)}" for i in range(2_000)]
    others = {"shape": jnp.ones(3), "gone": 1, "weight": 1}
    save({name: 1 for name in letters} | others)
    others = {"shape": jnp.ones(4), "wieght": 1}
    text = error_of({name: 1.0 for name in letters} | others)
    assert len(text) < 40
    assert "- And 1980 more leaves that are of a different kind." in text
    assert any("'shape': different shape" in line for line in text)
    assert any("Did you mean 'weight'?" in line for line in text)
    assert any("'gone': not in `like`" in line for line in text)


def test_leaves_that_differ_in_the_same_way_are_one_line():
    def tree(w, b, n=300):
        return {"layers": [{"w": w, "b": b, "c": i} for i in range(n)]}

    save(tree(jnp.ones((2, 2)), jnp.ones(2)))
    found = eqx_ckpt.tree_match(PATH, tree(jnp.ones((2, 3)), jnp.ones(2, jnp.bfloat16)))
    lines = [
        "300 dtype, 300 same, 300 shape; 7200 bytes to read in 600 requests, with 8 "
        "MiB of host memory.",
        "- 300 leaves such as 'layers/0/b': different dtype: bfloat16[2] in `like`, "
        "float32[2] in the checkpoint. `casting='same_kind'` allows it.",
        "- 300 leaves such as 'layers/0/w': different shape: float32[2, 3] in `like`, "
        "float32[2, 2] in the checkpoint.",
    ]
    assert str(found).splitlines() == lines
    assert repr(found) == str(found)
    assert len(found.leaves) == 900
    like = {"layers": [{"b": jnp.zeros(2), "c": i, "new": 0} for i in range(300)]}
    found = eqx_ckpt.tree_match(PATH, like, missing="keep", unexpected="ignore")
    assert len(str(found).splitlines()) == 3
    # Three are few enough to be told one by one.
    save(tree(jnp.ones((2, 2)), jnp.ones(2), 3))
    found = eqx_ckpt.tree_match(PATH, tree(jnp.ones((2, 3)), jnp.ones(2), 3))
    assert len(str(found).splitlines()) == 4


def test_suggestions_among_many_leaves():
    save({f"layer{i}": {"weight": i} for i in range(2000)})
    found = eqx_ckpt.tree_match(
        PATH, {f"layers{i}": {"weight": i} for i in range(2000)}
    )
    assert len(found.problems) == 4000
    assert all(leaf.status != "same" for leaf in found.problems.values())
    assert found.leaves["layers1/weight"].nearest[0] == "layer1/weight"


def test_suggestions_take_time_in_proportion_to_the_leaves(monkeypatch):
    """Comparing each name with each other took 11 seconds for 2,000."""
    compared = []
    ratio = difflib.SequenceMatcher.ratio

    def counted(self):
        compared.append(self)
        return ratio(self)

    monkeypatch.setattr(difflib.SequenceMatcher, "ratio", counted)
    save({f"a{i}b": i for i in range(5000)})
    assert not eqx_ckpt.tree_match(PATH, {f"x{i * 7}y": i for i in range(5000)}).ok
    assert len(compared) < 5000


def layers(n):
    return {f"layer{i}": {"w": np.ones(2), "b": jnp.ones(2)} for i in range(n)}


def calls_in_explaining(like):
    """How often functions of the package are called, which no slow machine changes."""
    package, count = os.path.dirname(eqx_ckpt.__file__), 0

    def count_calls(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    # What is cached depends on the tests before, and on the versions.
    str(eqx_ckpt.tree_match(PATH, like))
    before = sys.getprofile()
    sys.setprofile(count_calls)
    try:
        str(eqx_ckpt.tree_match(PATH, like))
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(("name", "most"), [("model", 38), ("net", 11)])
def test_a_leaf_takes_few_calls_to_plan_however_many_there_are(name, most):
    counts = []
    for n in (200, 600):
        save({"model": layers(n)})
        counts.append(calls_in_explaining({name: layers(n)}))
    assert 1 < (counts[1] - counts[0]) / 800 < most


def test_names_that_are_too_long_to_be_compared():
    save({"a" * 150: {"b" * 150: {str(i) * 150: 1 for i in range(8)}}})
    assert error_of({"a" * 150: {"b" * 150: {"c" * 150: {"d" * 600: 1}}}})


def test_a_skeleton_of_jax_says_what_to_use_instead():
    tree = {"w": jnp.ones(3), "step": 3}
    save(tree)
    text = error_of(jax.eval_shape(lambda: tree))
    assert "`equinox.filter_eval_shape`" in text[-1]
    assert "`equinox.partition`" not in text[-1]


def test_partitioned_parameters_say_where_the_others_are(getkey):
    model = {"in": eqx.nn.Linear(2, 2, key=getkey()), "drop": eqx.nn.Dropout(0.5)}
    parameters, _ = eqx.partition(model, eqx.is_inexact_array)
    save(model)
    text = error_of(parameters)
    assert "- 'drop/p': `None` in `like`, Python float in the checkpoint." in text
    assert "`equinox.partition`" in text[-1]
    save(parameters)
    text = error_of(model)
    assert "- 'drop/p': Python float in `like`, not in the checkpoint." in text
    assert "`equinox.combine`" in text[-1]
