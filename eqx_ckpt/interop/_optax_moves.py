"""A transform for the states of optax optimisers whose chain has changed."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._errors import LeafMismatchError
from .._format.leaf_names import encode, folders, is_below
from .._tree.leaves.key_paths import key_paths, typed
from .._tree.leaves.leaf_kinds import describe_like
from .._tree.matching.name_tree import nest, sortable, without_slashes
from .._types import check_kind, KeyPath


# The keys of a leaf, below the optimiser's state.
Keys: TypeAlias = tuple[str | int, ...]


# The fields in which the wrappers of optax have the state of what they wrap, and those
# in which they have one for each label.
_WRAPPERS = frozenset(
    "inner_state inner_opt_state base_optimizer_state opt_state adv_state".split()
)


_LABELLED = frozenset(["inner_states", "hyperparams_states"])


# Many links have one, so it does not tell a link.
_COUNT: Keys = ("count",)


# For what is left over, where a leaf of `like` has its name.
_UNUSED = "unused"


_MOST_LINES = 20


def optax_transform(
    like: PyTree,
    prefix: str = "",
    *,
    choose: Mapping[str, str | None] | None = None,
) -> Callable[[PyTree], PyTree]:
    """A `transform` for an optax state of which the chain has changed.

    The leaves of an optimiser's state are known by their field (`mu`, `nu`, `trace`,
    ...) and by the path of the parameter that they belong to. So they find their places
    wherever a link was added, removed or moved, in `chain`, `named_chain`, `masked`,
    `multi_transform`, `MultiSteps`, `inject_hyperparams`, `apply_if_finite` and other
    wrappers. A `count` goes with the other leaves of its link; that of a schedule has
    none, and is known if there is one such link.

    What is new has to be in `like`, and is kept with `missing="keep"`. What is left
    over is left out with `unexpected="ignore"`. Fields of the same name are taken to
    mean the same, though `nu` is a different average for `adamax` than for `adam`.

    **Arguments:**

    - `like`: as that of the restore.
    - `prefix`: the name of the optimiser's state in it, such as `"opt_state"`. It has
        the same name in the checkpoint. Call one transform after another for several.
    - `choose`: for what is ambiguous, a dictionary from names in `like` to names in the
        checkpoint, or to `None` for what is new. They may be names of parts:
        `{"opt_state/1": "opt_state/0"}`.

    **Returns:**

    A function for the `transform` of a restore. It moves leaves, and changes none.

    **Raises:**

    - [`eqx_ckpt.LeafMismatchError`][]: from the function that is returned: lists all
        leaves that are ambiguous; or there is no leaf below `prefix`.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp
        import optax

        params = {"w": jnp.ones(3)}
        eqx_ckpt.tree_serialise_leaves("ckpt", optax.adam(1e-3).init(params))

        optimiser = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
        like = optimiser.init(params)
        to_like = eqx_ckpt.interop.optax_transform(like)
        state = eqx_ckpt.tree_deserialise_leaves("ckpt", like, transform=to_like)
        ```
    """
    prefix = without_slashes(prefix)
    wanted = list(_leaves_of(like, prefix))
    if choose is not None:
        check_kind("choose", choose, Mapping, "a dictionary of names")
    chosen = dict(choose or {})

    def transform(old: PyTree) -> PyTree:
        values = {
            tuple(token for _, token in typed(path)): leaf
            for path, leaf in key_paths(sortable(old))
        }
        there = _leaves_there(values, wanted, prefix)
        if not wanted and not there:
            raise LeafMismatchError(
                f"Neither `like` nor the checkpoint has a leaf below {prefix!r}, which "
                "is to be the name of an optimiser's state."
            )
        moves = _Moves(wanted, there)
        moves.choose(chosen)
        moves.match_fields()
        moves.match_counts()
        moves.check()
        return _moved(values, moves, _depth(prefix))

    return transform


class _Leaf(NamedTuple):
    """A leaf of the state of an optimiser: its keys, and how many lead to its link."""

    name: str
    keys: Keys
    depth: int

    @property
    def link(self) -> Keys:
        return self.keys[: self.depth]

    @property
    def meaning(self) -> Keys:
        """Its field, followed by the path of its parameter."""
        return self.keys[self.depth :]


def _depth(prefix: str) -> int:
    return prefix.count("/") + 1 if prefix else 0


def _leaves_of(like: PyTree, prefix: str) -> Iterator[_Leaf]:
    """The leaves of `like` below a name; their links are the states of optax."""
    above = _depth(prefix)
    for path, node in key_paths(like, _is_link):
        for link, rest, leaf in _parts(node):
            typed_keys = typed((*path, *link, *rest))
            name, keys = encode(typed_keys), tuple(token for _, token in typed_keys)
            if describe_like(leaf) is None or not is_below(prefix, name):
                continue
            depth = len(path) + len(link)
            if not _is_link(node):  # Not of optax.
                depth = above + _depth_of_link(keys[above:], ())
            yield _Leaf(name, keys, depth)


def _parts(node: Any) -> Iterator[tuple[KeyPath, KeyPath, Any]]:
    """Each leaf of a node with the path of its link, and its path in that link."""
    if not _is_link(node):
        yield (), (), node
        return
    for field, value in zip(node._fields, node, strict=True):
        key = jtu.GetAttrKey(field)
        is_wrapper = any(map(_is_link, jtu.tree_leaves(value, _is_link)))
        for path, inner in key_paths(value, _is_link if is_wrapper else None):
            if not is_wrapper:
                yield (), (key, *path), inner
                continue
            for link, rest, leaf in _parts(inner):
                yield (key, *path, *link), rest, leaf


def _is_link(node: Any) -> bool:
    """Whether it is a state of optax that has fields."""
    is_optax = type(node).__module__.partition(".")[0] == "optax"
    return is_optax and bool(getattr(node, "_fields", ()))


def _leaves_there(
    values: Iterable[Keys], wanted: Sequence[_Leaf], prefix: str
) -> list[_Leaf]:
    """The leaves of the checkpoint below a name, which alone tells their links."""
    above = _depth(prefix)
    meanings = {leaf.meaning for leaf in wanted} - {_COUNT}
    wrappers = {key for leaf in wanted for key in leaf.link[above:]}
    leaves: list[_Leaf] = []
    for keys in values:
        name = encode(tuple(("key", token) for token in keys))
        if is_below(prefix, name):
            starts = (d for d in range(above, len(keys)) if keys[d:] in meanings)
            leaves.append(_Leaf(name, keys, next(starts, -1)))
    links = {leaf.link for leaf in leaves if leaf.depth >= 0}
    for i, (name, keys, depth) in enumerate(leaves):
        if depth < 0:
            known = [d for d in range(above, len(keys)) if keys[:d] in links]
            depth = above + _depth_of_link(keys[above:], wrappers)
            leaves[i] = _Leaf(name, keys, max([depth, *known]))
    return leaves


def _depth_of_link(keys: Keys, wrappers: Collection[str | int]) -> int:
    """How many of the keys lead to a link: positions, and the fields of wrappers."""
    depth = 0
    while depth < len(keys):
        key = keys[depth]
        is_wrapper = isinstance(key, int) or key in _WRAPPERS or key in wrappers
        step = 2 if key in _LABELLED else int(is_wrapper)
        if not step or depth + step >= len(keys):
            break
        depth += step
    return depth


class _Moves:
    """Where each leaf of `like` comes from; `None` if it is new."""

    def __init__(self, wanted: Sequence[_Leaf], there: Sequence[_Leaf]) -> None:
        self.wanted = wanted
        self.there = there
        self.found: dict[_Leaf, _Leaf | None] = {}
        self._ambiguous: dict[_Leaf, Sequence[_Leaf]] = {}

    def choose(self, chosen: Mapping[str, str | None]) -> None:
        """Follow what the user says."""
        by_name = {leaf.name: leaf for leaf in self.there}
        problems: list[str] = []
        for name, origin in chosen.items():
            leaves = [leaf for leaf in self.wanted if is_below(name, leaf.name)]
            for leaf in leaves:
                rest = leaf.name[len(name) :].strip("/")
                source = "/".join(part for part in (origin, rest) if part)
                self.found[leaf] = None if origin is None else by_name.get(source)
            if not leaves:
                problems.append(
                    f"- {name!r} is not in the optimiser's state in `like`."
                )
            elif origin is not None and not any(self.found[leaf] for leaf in leaves):
                problems.append(
                    f"- {origin!r} is not in the optimiser's state in the checkpoint."
                )
        if problems:
            raise LeafMismatchError("`choose` does not fit:\n" + "\n".join(problems))

    def match_fields(self) -> None:
        """Match the leaves of the same field and parameter."""
        taken = {leaf for leaf in self.found.values() if leaf}
        wanted, there = _by_meaning(self.wanted), _by_meaning(self.there)
        for meaning, leaves in wanted.items():
            if meaning != _COUNT:
                self._pair(
                    [leaf for leaf in leaves if leaf not in self.found],
                    [leaf for leaf in there.get(meaning, ()) if leaf not in taken],
                )

    def match_counts(self) -> None:
        """Match each `count` as the other leaves of its link, if there are any."""
        counts = {leaf.link: leaf for leaf in self.there if leaf.meaning == _COUNT}
        alone = _alone(self.there)
        schedules = [leaf for leaf in _alone(self.wanted) if leaf not in self.found]
        self._pair(schedules, alone)
        for leaf in self.wanted:
            if leaf.meaning != _COUNT or leaf in self.found or leaf in self._ambiguous:
                continue
            origins, is_sure = self._origins(leaf.link)
            candidates = [counts[link] for link in origins if link in counts]
            if candidates and not is_sure:
                self._ambiguous[leaf] = candidates
            else:
                self.found[leaf] = candidates[0] if candidates else None

    def _pair(self, wanted: Sequence[_Leaf], there: Sequence[_Leaf]) -> None:
        """Pair leaves that mean the same, if there is one of each, or all stayed."""
        same = {leaf.name: leaf for leaf in there}
        if not there:
            self.found |= dict.fromkeys(wanted)
        elif len(wanted) == len(there) == 1:
            self.found[wanted[0]] = there[0]
        elif {leaf.name for leaf in wanted} == same.keys():
            self.found |= {leaf: same[leaf.name] for leaf in wanted}
        else:
            self._ambiguous |= dict.fromkeys(wanted, there)

    def _origins(self, link: Keys) -> tuple[Collection[Keys], bool]:
        """The links that the other leaves are from, and whether it is one for sure."""
        others = [x for x in self.wanted if x.link == link and x.meaning != _COUNT]
        known = dict.fromkeys(x.link for x in map(self.found.get, others) if x)
        doubts = [x.link for leaf in others for x in self._ambiguous.get(leaf, ())]
        return [*(known | dict.fromkeys(doubts))], len(known) < 2 and not doubts

    def check(self) -> None:
        """Raise for all leaves that are ambiguous."""
        if not self._ambiguous:
            return
        lines = [
            f"- {leaf.name!r}: {' or '.join(repr(other.name) for other in others)}."
            for leaf, others in self._ambiguous.items()
        ]
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"- And {len(lines) - _MOST_LINES} more leaves."]
        name, others = next(iter((a.name, b) for a, b in self._ambiguous.items()))
        new = [leaf.name for leaf in self.wanted if self.found.get(leaf, leaf) is None]
        if new:
            lines.append(f"New, and not ambiguous: {', '.join(map(repr, new[:10]))}.")
        raise LeafMismatchError(
            "The names do not say where these leaves of the optimiser's state come "
            "from:\n" + "\n".join(lines) + "\nSay it with `choose`, such as "
            f"`choose={{{name!r}: {others[0].name!r}}}`, or `None` in place of the "
            "second name for what is new. Names of parts, such as links, will do."
        )


def _by_meaning(leaves: Iterable[_Leaf]) -> dict[Keys, list[_Leaf]]:
    found: dict[Keys, list[_Leaf]] = {}
    for leaf in leaves:
        found.setdefault(leaf.meaning, []).append(leaf)
    return found


def _alone(leaves: Sequence[_Leaf]) -> list[_Leaf]:
    """The counts of links that have nothing else, such as schedules."""
    others = {leaf.link for leaf in leaves if leaf.meaning != _COUNT}
    return [x for x in leaves if x.meaning == _COUNT and x.link not in others]


def _moved(values: Mapping[Keys, Any], moves: _Moves, depth: int) -> PyTree:
    """The tree in which each leaf is at its place in `like`."""
    origins = {leaf for leaf in moves.found.values() if leaf}
    there = {leaf.keys for leaf in moves.there}
    leaves = {keys: value for keys, value in values.items() if keys not in there}
    for leaf, origin in moves.found.items():
        if origin is not None:
            leaves[leaf.keys] = values[origin.keys]
    names = {leaf.name for leaf in moves.wanted}
    above = folders(names)
    for leaf in moves.there:
        if leaf not in origins:
            is_in_the_way = leaf.name in names | above or folders([leaf.name]) & names
            rest = leaf.keys[depth:]
            keys = (*leaf.keys[:depth], _UNUSED, *rest) if is_in_the_way else leaf.keys
            leaves[keys] = values[leaf.keys]
    return nest(leaves.items())
