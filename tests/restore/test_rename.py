"""A transform that renames leaves by regular expressions."""

import re

import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import given, settings, strategies as st

import eqx_ckpt


PATH = "memory://rename"
KEYS = st.text(max_size=3) | st.sampled_from(["0", "Wq", "wq", "a/b", "@root", ".."])
TREES = st.recursive(
    st.integers(0, 99),
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=3),
        st.dictionaries(KEYS, children, min_size=1, max_size=3),
        st.dictionaries(st.integers(-2, 12), children, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@settings(max_examples=40)
@given(TREES, st.randoms(use_true_random=False))
def test_any_names_into_any_others(tree, random):
    """The leaves of a tree change places, by way of names that are new."""
    values = jtu.tree_leaves(tree)
    arrays = jtu.tree_map(lambda x: jnp.full(2, x), tree)
    eqx_ckpt.tree_serialise_leaves(PATH, arrays, overwrite=True)
    names = [*eqx_ckpt.inspect.read_manifest(PATH).leaves]
    order = random.sample(range(len(names)), len(names))
    away = {f"^{re.escape(name)}$": f"new/{i}" for i, name in enumerate(names)}
    back = {f"new/{i}": names[j] for i, j in enumerate(order)}
    to_like = eqx_ckpt.rename(away | back)
    found = eqx_ckpt.tree_deserialise_leaves(
        PATH, jtu.tree_map(jnp.zeros_like, arrays), transform=to_like
    )
    expected = dict(zip(order, values, strict=True))
    for position, leaf in enumerate(jtu.tree_leaves(found)):
        assert (leaf == expected[position]).all()


def renamed(tree, patterns, like):
    eqx_ckpt.tree_serialise_leaves(PATH, tree, overwrite=True)
    to_like = eqx_ckpt.rename(patterns)
    return eqx_ckpt.tree_deserialise_leaves(PATH, like, transform=to_like)


@pytest.mark.parametrize(
    ("old", "patterns", "new"),
    [
        ("enc/enc/w", {"enc": "a"}, "a/a/w"),
        ("enc/enc/w", {"^enc": "a"}, "a/enc/w"),
        ("enc/w", {"^enc": ""}, "w"),
        ("enc/w", {"w$": "x/y"}, "enc/x/y"),
        ("a/b/c", {"a/b": "c", "c/c": "d/e"}, "d/e"),
        ("q_proj/w", {r"(\w)_proj": r"\1"}, "q/w"),
        ("q_proj/w", {r"(?P<kind>\w)_proj": r"\g<kind>"}, "q/w"),
        ("h/11/w", {r"h/(\d+)": lambda m: f"blocks/{int(m[1]) - 1}"}, "blocks/10/w"),
        ("a.b/w", {r"a\.b": "a+b"}, "a+b/w"),
        ("w", {"w": "0"}, "0"),
    ],
)
def test_a_name(old, patterns, new):
    """The keys of whole names, in the order of the patterns."""

    def tree(name):
        keys = [int(key) if key.isdigit() else key for key in name.split("/")]
        leaf = jnp.ones(3)
        for key in reversed(keys):
            leaf = {key: leaf}
        return leaf

    found = renamed(tree(old), patterns, tree(new))
    assert (jtu.tree_leaves(found)[0] == 1).all()


def test_everything_that_does_not_fit_is_one_error():
    tree = {"a": {"w": 1, "v": 2}, "b": {"w": 3}, "c": 4, "encoder": 5}
    patterns = {
        "[ab]/w": "x",
        "a/v": "c/v",
        "enc": "body",
        "c/v/w": "nothing",
        "encoder": "a b",
    }
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        renamed(tree, patterns, {"x": 1})
    assert str(error.value).splitlines() == [
        "`rename` does not fit:",
        "- 'enc' matches no whole keys of any name, after the patterns before it. "
        "There is 'a/v', 'a/w', 'b/w', ...",
        "- 'c/v/w' matches no whole keys of any name, after the patterns before it. "
        "There is 'a/v', 'a/w', 'b/w', ...",
        "- 'a/w', 'b/w' would all become 'x'.",
        "- 'c' would become 'c', and 'a/v' 'c/v', which is inside of that.",
        "- 'encoder' would become 'a b': write 'a%20b' for the key 'a b'.",
    ]
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'c' would have no key left"):
        renamed(tree, {"^c": ""}, {"x": 1})


def test_patterns_that_are_wrong_are_one_error():
    with pytest.raises(ValueError, match="`patterns`") as error:
        eqx_ckpt.rename({"(a": "b", "(c)": r"\2", "(d)": r"\g<e>", "(f)": r"\1"})
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == [
        "- '(a' to 'b'",
        r"- '(c)' to '\\2'",
        r"- '(d)' to '\\g<e>'",
    ]


def test_within_a_transform_and_below_a_prefix():
    old = {"net": {"h": [{"w": jnp.full(2, i)} for i in range(3)], "s": 7}}
    eqx_ckpt.tree_serialise_leaves(PATH, old, overwrite=True)
    to_new = eqx_ckpt.rename({"h": "layers", "w": "weight"})

    def stacked(tree):
        new = to_new(tree)
        layers = [new["layers"][i]["weight"] for i in range(3)]
        return {"weights": jnp.stack(layers), "s": new["s"]}

    like = {"weights": jnp.zeros((3, 2), int), "s": 0}
    found = eqx_ckpt.tree_deserialise_leaves(
        PATH, like, prefix="net", transform=stacked
    )
    assert found["weights"][:, 0].tolist() == [0, 1, 2]
    assert found["s"] == 7


def test_flags_of_a_pattern():
    old = {"Enc": {"w": jnp.ones(2)}, "head": jnp.zeros(1)}
    eqx_ckpt.tree_serialise_leaves(PATH, old, overwrite=True)
    like = {"e": {"w": jnp.zeros(2)}, "head": jnp.zeros(1)}
    for pattern in ("(?i)enc", "(?ix) e n c  # at any case", "(?i:enc)"):
        found = eqx_ckpt.tree_deserialise_leaves(
            PATH, like, transform=eqx_ckpt.rename({pattern: "e"})
        )
        assert found["e"]["w"].tolist() == [1, 1]


def test_a_function_has_to_return_a_text():
    eqx_ckpt.tree_serialise_leaves(PATH, {"h": [jnp.ones(1)] * 2}, overwrite=True)
    rename = eqx_ckpt.rename({r"\d+": lambda match: int(match[0]) + 1})
    with pytest.raises(TypeError, match=r"the function for '\\\\d\+' returned 1"):
        rename({"h": [jnp.ones(1)] * 2})
