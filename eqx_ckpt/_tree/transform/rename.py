"""A transform that renames leaves by regular expressions."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from jaxtyping import PyTree

from ..._errors import LeafMismatchError
from ..._format.leaf_names import decode, encode_component, inside_others, ROOT
from ..._types import check_kind, shown
from ..leaves.key_paths import key_paths, Namer
from ..matching.name_tree import nest, sortable
from .transform_argument import Transform


# As that of `re.sub`.
Replacement: TypeAlias = str | Callable[[re.Match[str]], str]


_SHOWN = 10


def rename(patterns: Mapping[str, Replacement]) -> Transform:
    r"""A `transform` that renames leaves by regular expressions.

    A pattern matches one key, or several keys joined by `/`, never a part of a key:
    `"enc"` does not match in `"encoder/w"`. It replaces them wherever they are in a
    name; `"^enc"` only at its beginning. The patterns are applied in their order, each
    to what the ones before it have made. Leaves that no pattern matches stay.

    **Arguments:**

    - `patterns`: a dictionary from regular expressions, of Python's `re`, to what
        replaces them, as in `re.sub`: a text in which `\1` or `\g<name>` stand for
        groups, or a function of the `re.Match`, to compute numbers of layers. An empty
        text removes the keys. Names are those that [`eqx_ckpt.tree_match`][] prints,
        below the `prefix` of the restore if it has one; keys that are numbers are
        positions in a list.

    **Returns:**

    A function for the `transform` of a restore. In a `transform` of your own, call it
    with the checkpoint's tree to get one of the new names.

    **Raises:**

    - `ValueError`: lists the patterns that are no regular expressions, or whose
        replacements name groups that they do not have.
    - [`eqx_ckpt.LeafMismatchError`][]: from the function that is returned: lists the
        patterns that match nothing, the names that several leaves would get, and what
        is no name.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        old = {"layers": [{"attn": {"w": jnp.ones(3)}}, {"attn": {"w": jnp.ones(3)}}]}
        eqx_ckpt.tree_serialise_leaves("ckpt", old)

        like = {"blocks": [{"w": jnp.zeros(3)}, {"w": jnp.zeros(3)}]}
        to_like = eqx_ckpt.rename({r"layers/(\d+)/attn": r"blocks/\1"})
        new = eqx_ckpt.tree_deserialise_leaves("ckpt", like, transform=to_like)
        ```
    """
    check_kind("patterns", patterns, Mapping, "a dictionary from patterns to texts")
    rules = _compiled(patterns)

    def transform(old: PyTree) -> PyTree:
        names = Namer()
        renamed = _Renamed()
        for path, leaf in key_paths(sortable(old)):
            name, keys = names(path)
            tokens = [token for _, token in keys]
            renamed.add(_new_name(name, rules, renamed.matched), name, tokens, leaf)
        renamed.check(patterns)
        return nest(renamed.leaves.values())

    return transform


_Rules = Mapping[str, tuple[re.Pattern[str], Replacement]]


def _compiled(patterns: Mapping[str, Replacement]) -> _Rules:
    rules: dict[str, tuple[re.Pattern[str], Replacement]] = {}
    problems: list[str] = []
    for pattern, new in patterns.items():
        check_kind("patterns", pattern, str, "a dictionary from patterns to texts")
        if not callable(new):
            wanted = f"a text or a function for the pattern {pattern!r}"
            check_kind("patterns", new, str, wanted)
        try:
            re.compile(pattern)
            rule = _of_whole_keys(pattern)
            if not callable(new):
                rule.sub(new, "")
            rules[pattern] = rule, new
        except (re.error, IndexError) as e:
            to = "" if callable(new) else f" to {new!r}"
            problems.append(f"- {pattern!r}{to}: {e}.")
    if problems:
        raise ValueError(
            "`patterns` has regular expressions, or replacements, that are wrong:\n"
            + "\n".join(problems)
        )
    return rules


_FLAGS = re.compile(r"(\(\?[aimsux]+\))?(.*)", re.DOTALL)


def _of_whole_keys(pattern: str) -> re.Pattern[str]:
    """Let a pattern match between two slashes, or the ends of a name."""
    found = _FLAGS.fullmatch(pattern)
    assert found is not None
    flags, rest = found[1] or "", found[2]
    end = "\n" if "x" in flags else ""  # It may end with a comment.
    return re.compile(f"{flags}(?<![^/])(?:{rest}{end})(?![^/])")


def _new_name(name: str, rules: _Rules, matched: set[str]) -> str:
    """A name after all rules; `matched` gets the patterns that match in it."""
    for pattern, (rule, new) in rules.items():
        name, count = rule.subn(_as_texts(pattern, new), name)
        if count:
            matched.add(pattern)
            name = "/".join(filter(None, name.split("/")))
    return name or ROOT


def _as_texts(pattern: str, new: Replacement) -> Replacement:
    if not callable(new):
        return new

    def checked(match: re.Match[str]) -> str:
        text: Any = new(match)
        if not isinstance(text, str):
            raise TypeError(
                f"`patterns`: the function for {pattern!r} returned {shown(text)}. "
                "Return a text."
            )
        return text

    return checked


class _Renamed:
    """The leaves by their new names, and what is wrong with these."""

    def __init__(self) -> None:
        self.leaves: dict[str, tuple[list[str | int], Any]] = {}
        self.matched: set[str] = set()
        self._old: dict[str, list[str]] = {}
        self._problems: list[str] = []

    def add(self, name: str, old: str, tokens: list[str | int], leaf: Any) -> None:
        self._old.setdefault(name, []).append(old)
        # A long key cannot be decoded, so it is looked up.
        known = dict(zip(old.split("/"), tokens, strict=False))
        keys: list[str | int] = []
        for part in name.split("/") if name != ROOT else ():
            try:
                keys.append(known[part] if part in known else _key(part))
            except ValueError:
                written = encode_component(part, False)
                self._problems.append(
                    f"- {old!r} would become {name!r}: write {written!r} for the key "
                    f"{part!r}."
                )
        self.leaves[name] = keys, leaf

    def check(self, patterns: Mapping[str, Replacement]) -> None:
        """Raise for everything that is wrong."""
        problems = [*self._unmatched(patterns), *self._clashes(), *self._problems]
        if problems:
            shown = problems[:_SHOWN]
            if more := len(problems) - len(shown):
                shown.append(f"- And {more} more problems.")
            raise LeafMismatchError("`rename` does not fit:\n" + "\n".join(shown))

    def _unmatched(self, patterns: Mapping[str, Replacement]) -> Iterator[str]:
        names = [old for olds in self._old.values() for old in olds]
        for pattern in patterns:
            if pattern not in self.matched:
                shown = ", ".join(map(repr, names[:3])) or "no leaf"
                more = ", ..." if len(names) > 3 else ""
                yield (
                    f"- {pattern!r} matches no whole keys of any name, after the "
                    f"patterns before it. There is {shown}{more}"
                )

    def _clashes(self) -> Iterator[str]:
        for name, olds in self._old.items():
            if len(olds) > 1:
                some = ", ".join(map(repr, olds[:3]))
                more = f" and {len(olds) - 3} more" if len(olds) > 3 else ""
                yield f"- {some}{more} would all become {name!r}."
        is_alone = len(self._old) == 1
        for outer, inner in inside_others(self._old):
            yield (
                f"- {self._old[outer][0]!r} would become {outer!r}, and "
                f"{self._old[inner][0]!r} {inner!r}, which is inside of that."
            )
        if ROOT in self._old and not is_alone:
            yield f"- {self._old[ROOT][0]!r} would have no key left."


def _key(part: str) -> str | int:
    """The key of a part of a name; `ValueError` if it is none."""
    [(_, token)] = decode(part, "k")
    return token
