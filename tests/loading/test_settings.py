"""The settings of a loader stay with its cursor, wherever a restore gets it from."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqx_ckpt
from eqx_ckpt import data


def loader(count: int, batch_size: int, order: Any, cache: int = 1) -> data.Loader:
    source = data.ArrayDataSource(i=np.arange(count))
    return data.Loader(source, batch_size, order=order, cache=cache)


LOADERS = {
    "first": loader(10, 2, "shuffle"),
    "cached": loader(10, 2, "shuffle", cache=3),
    "of larger batches": loader(10, 5, "shuffle"),
    "of more rows": loader(11, 2, "shuffle"),
    "in order": loader(10, 2, "sequential"),
}
# For each place in what a restore sees, the place in the checkpoint.
MOVES: Mapping[str, dict[str, str]] = {
    "identity": {"a": "a", "b": "b"},
    "moved": {"c": "a", "b": "b"},
    "deeper": {"x/y": "a", "b": "b"},
    "swapped": {"a": "b", "b": "a"},
    "copied": {"a": "a", "c": "a"},
    "dropped": {"b": "b"},
    "replaced": {"a": "b"},
}


def nest(places: Mapping[str, Any]) -> Any:
    tree: dict[str, Any] = {}
    for place, value in places.items():
        *folders, last = place.split("/")
        node = tree
        for key in folders:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def at(tree: Any, place: str) -> Any:
    for key in place.split("/"):
        tree = tree[key]
    return tree


def by_function(moves: Mapping[str, str]) -> Callable[[Any], Any]:
    return lambda tree: nest({new: tree[old] for new, old in moves.items()})


def by_computing(moves: Mapping[str, str]) -> Callable[[Any], Any]:
    """The positions are computed, and the seeds are views."""

    def change(tree: Any) -> Any:
        def changed(cursor: Any) -> Any:
            position = jnp.maximum(cursor["position"], 0)
            return {**cursor, "position": position, "seed": cursor["seed"].reshape(())}

        return nest({new: changed(tree[old]) for new, old in moves.items()})

    return change


def by_rename(moves: Mapping[str, str]) -> Callable[[Any], Any]:
    if len({*moves.values()}) < len(moves):
        return by_function(moves)
    aside = {f"{old}/(.+)": rf"{old}_/\1" for old in "ab"}
    back = {f"{old}_/(.+)": rf"{new}/\1" for new, old in moves.items()}
    return eqx_ckpt.rename(aside | back)


TRANSFORMS = [by_function, by_computing, by_rename]


def eager(path: str, tree: Any, like: Any, **how: Any) -> Any:
    return eqx_ckpt.tree_deserialise_leaves(path, like, **how)


def picked(path: str, tree: Any, like: Any, **how: Any) -> Any:
    """What `where` does not pick is compared, too, if it says what a position means."""
    is_cursor = lambda x: isinstance(x, data.Cursor)  # noqa: E731

    def where(like: Any) -> Any:
        cursors = jax.tree.leaves(like, is_leaf=is_cursor)
        return [getattr(c, k) for c in cursors for k in ("seed", "epoch", "position")]

    return eqx_ckpt.tree_deserialise_leaves(path, like, where=where, **how)


def initialised(path: str, tree: Any, like: Any, **how: Any) -> Any:
    return eqx_ckpt.restore_or_init(path, lambda: like, **how)


def below(path: str, tree: Any, like: Any, **how: Any) -> Any:
    eqx_ckpt.tree_serialise_leaves(path, {"in": tree}, overwrite=True)
    return eqx_ckpt.tree_deserialise_leaves(path, like, prefix="in", **how)


def managed(path: str, tree: Any, like: Any, **how: Any) -> Any:
    with eqx_ckpt.CheckpointManager(f"{path}-run") as manager:
        for step in manager.steps():
            manager.delete(step)
        manager.save(1, tree)
        manager.wait()
        return manager.restore(like, **how)


def in_memory(path: str, tree: Any, like: Any, **how: Any) -> Any:
    state = eqx_ckpt.interop.to_state_dict(tree)
    assert len(jax.tree.leaves(state)) == 6
    return eqx_ckpt.interop.from_state_dict(like, state, **how)


def of_a_tree(path: str, tree: Any, like: Any, **how: Any) -> Any:
    return eqx_ckpt.interop.from_state_dict(like, tree, **how)


def copied(path: str, tree: Any, like: Any, **how: Any) -> Any:
    eqx_ckpt.copy(path, f"{path}-copy", overwrite=True)
    return eqx_ckpt.tree_deserialise_leaves(f"{path}-copy", like, **how)


WAYS = [eager, picked, initialised, below, managed, in_memory, of_a_tree, copied]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_settings_go_where_their_cursor_goes(draws):
    moves = MOVES[draws.draw(st.sampled_from([*MOVES]))]
    saved = {x: LOADERS[draws.draw(st.sampled_from([*LOADERS]))] for x in "ab"}
    tree = {x: it.next(it.start(seed))[0] for seed, (x, it) in enumerate(saved.items())}
    eqx_ckpt.tree_serialise_leaves("memory://settings", tree, overwrite=True)
    likes: dict[str, tuple[data.Loader, bool]] = {}
    for place, old in moves.items():
        is_right = draws.draw(st.booleans())
        name = draws.draw(st.sampled_from([*LOADERS]))
        it = saved[old] if is_right else LOADERS[name]
        likes[place] = it, draws.draw(st.sampled_from([False, False, True]))
    like = nest({p: it.start(9, accept_any=any_) for p, (it, any_) in likes.items()})
    way = draws.draw(st.sampled_from(WAYS))
    is_abstract = way in (eager, below, copied) and draws.draw(st.booleans())
    seen = eqx.filter_eval_shape(lambda: like) if is_abstract else like
    wrong = {
        place
        for place, (it, accepts_any) in likes.items()
        if not accepts_any and it.settings != saved[moves[place]].settings
    }
    change = draws.draw(st.sampled_from(TRANSFORMS))(moves)
    how = {"transform": change, "unexpected": "ignore"}
    restore = lambda: way("memory://settings", tree, seen, **how)  # noqa: E731
    if wrong:
        with pytest.raises(eqx_ckpt.LeafMismatchError, match="different loader") as e:
            restore()
        found = {place for place in moves if f"'{place}/block'" in str(e.value)}
        assert found == wrong
        return
    found = restore()
    for place, (it, _) in likes.items():
        cursor, before = at(found, place), tree[moves[place]]
        for field in ("seed", "epoch", "position"):
            assert getattr(cursor, field) == getattr(before, field)
        expected = it.next(eqx.tree_at(lambda c: c.block, before, cursor.block))[1]
        assert (it.next(cursor)[1]["i"] == expected["i"]).all()


@pytest.fixture
def begun(tmp_path) -> tuple[str, data.Loader]:
    it = LOADERS["first"]
    path = str(tmp_path / "c")
    eqx_ckpt.tree_serialise_leaves(path, {"a": it.next(it.start(3))[0], "b": 1.0})
    return path, it


def test_parts_of_different_cursors_are_no_cursor(tmp_path):
    first, other = LOADERS["first"], LOADERS["in order"]
    tree = {"a": first.start(1), "b": other.start(2), "c": first.start(3)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)

    def mixed(with_: str) -> Callable[[Any], Any]:
        return lambda tree: {"a": {**tree["a"], "seed": tree[with_]["seed"]}}

    for it in (first, other):
        with pytest.raises(eqx_ckpt.LeafMismatchError, match="sequential .* and rows="):
            eqx_ckpt.tree_deserialise_leaves(
                tmp_path / "c", {"a": it.start()}, transform=mixed("b")
            )
    found = eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "c", {"a": first.start()}, transform=mixed("c")
    )
    assert found["a"].seed == 3


def test_a_position_without_settings_is_refused(begun):
    path, it = begun
    cursor = {"seed": np.uint32(1), "epoch": np.uint32(2), "position": np.uint32(4)}
    make = lambda tree: {"a": cursor}  # noqa: E731
    for source, how in ((path, {"transform": make}), (_saved(cursor, path), {})):
        with pytest.raises(eqx_ckpt.LeafMismatchError, match="no settings") as e:
            eqx_ckpt.tree_deserialise_leaves(source, {"a": it.start()}, **how)
        assert "accept_any=True" in str(e.value)
        like = {"a": it.start(accept_any=True)}
        found = eqx_ckpt.tree_deserialise_leaves(source, like, **how)
        assert found["a"].position == 4


def _saved(cursor: Any, path: str) -> str:
    eqx_ckpt.tree_serialise_leaves(f"{path}2", {"a": cursor})
    return f"{path}2"


def test_a_transform_can_return_a_cursor(begun):
    path, it = begun
    new = LOADERS["in order"]
    for wanted, is_right in ((new, True), (it, False)):
        restore = lambda like: eqx_ckpt.tree_deserialise_leaves(  # noqa: E731
            path,
            {"a": like, "b": 0.0},
            transform=lambda tree: {**tree, "a": new.start(7)},
        )
        if is_right:
            assert restore(wanted.start())["a"].seed == 7
        else:
            with pytest.raises(eqx_ckpt.LeafMismatchError, match="different loader"):
                restore(wanted.start())


def test_a_cursor_that_is_kept_is_that_of_like(begun):
    """Nothing of it is restored, so the settings of the checkpoint do not matter."""
    path, _ = begun
    other = LOADERS["in order"].start(5)
    like = {"a": other, "b": 0.0}
    by_where = {"where": lambda tree: tree["b"]}
    dropped = {"transform": lambda tree: {"b": tree["b"]}, "missing": "keep"}
    for how in (by_where, dropped):
        found = eqx_ckpt.tree_deserialise_leaves(path, like, **how)
        assert found["b"] == 1.0
        assert found["a"].seed == 5
    like = {"new": other, "b": 0.0}
    how = {"missing": "keep", "unexpected": "ignore"}
    assert eqx_ckpt.tree_deserialise_leaves(path, like, **how)["new"].seed == 5
    assert eqx_ckpt.tree_match(path, like, **how).leaves["new/block"].status == "same"
