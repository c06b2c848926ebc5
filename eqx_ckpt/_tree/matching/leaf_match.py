"""What a restore would do, leaf by leaf, and how to say it."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args, Literal, NamedTuple, TypeAlias

from ..._format.display import escape, printable, table_html
from ..._format.leaf_record import LeafRecord, SCALAR_KINDS
from ..leaves.casting import becomes, WORDS
from .sharding_argument import Place
from .similar_names import did_you_mean, renamed


Harmless: TypeAlias = Literal[
    "same",
    "renamed",
    "computed",
    "cast",
    "value",
    "custom",
    "kept",
    "ignored",
    "changed",
]


Status: TypeAlias = Literal[
    Harmless,
    "missing",
    "abstract",
    "unexpected",
    "kind",
    "shape",
    "dtype",
    "sharding",
    "loader",
]


_HARMLESS = frozenset(get_args(Harmless))


# What is found for a leaf that a `transform` does not return.
UNRETURNED = "nothing that `transform` returns"


class LeafMatch(NamedTuple):
    """One leaf of `like` beside the leaf of the checkpoint of the same name.

    **Attributes:**

    - `status`: what would become of it. Restored: `"same"`; `"renamed"` or `"computed"`
        by the `transform`; `"cast"`, as `casting` allows; or `"value"`, a Python
        number whose value in `like` differs. Not known: `"custom"`, which is
        left to a `filter_spec` of yours. Not restored: `"kept"` as it is in `like`, or
        `"ignored"`, as `missing`, `mismatched`, `unexpected` and
        `array_deserialise_filter_spec` say; or `"changed"`: a leaf that is never saved,
        such as a function, is not the one that was there at the save. All others stop a
        restore: `"missing"` from the checkpoint; `"abstract"`: to be kept, and `like`
        has no value to keep; `"unexpected"`: in the checkpoint, but not in `like`; a
        different `"kind"` (of leaf), `"shape"` or `"dtype"`; a `"sharding"` that it
        cannot have; or the position of a different `"loader"` of data.
    - `expected`: what `like` has; it prints in words.
    - `found`: what the checkpoint has; it prints in words.
    - `nearest`: the most similar names, for a missing leaf; of very many, for those
        that were renamed together, and the first ones of the others.
    - `replicated`: the axes of its saved sharding over which it would be replicated,
        because the mesh lacks them or they do not divide it.
    - `origin`: the names in the checkpoint, if a `transform` renamed or computed it;
        if it returns no such leaf, similar names of what it does not use.
    - `computed`: whether the `transform` computed it.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3)})
        match = eqx_ckpt.tree_match("ckpt", {"w": jnp.ones(4)})
        leaf = match.leaves["w"]
        print(leaf.status, "-", leaf.expected, "-", leaf.found)
        ```
    """

    status: Status
    expected: LeafRecord | str = "nothing"
    found: LeafRecord | str = "nothing"
    nearest: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    origin: tuple[str, ...] = ()
    computed: bool = False

    @property
    def is_harmless(self) -> bool:
        """Whether a restore would go on."""
        return self.status in _HARMLESS


@dataclass(frozen=True, repr=False)
class TreeMatch:
    """What a restore would do; `print` it, or look at its parts.

    **Attributes:**

    - `leaves`: a [`eqx_ckpt.inspect.LeafMatch`][] for every leaf, by its name.
    - `nbytes`: the bytes that the restore would read in this process.
    - `requests`: in how many parts: the chunks of a checkpoint, each of which is a file
        of a directory, or a value in a store or database; parts of about 8 MiB of other
        files.
    - `host_bytes`: the host memory that the restore would take in this process at its
        peak, besides what the process has already. Arrays that it restores to host
        memory are part of it: those of NumPy, and those of JAX on a CPU.
    - `least_host_bytes`: the least `max_host_bytes` that it would accept.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.ones(3)})
        match = eqx_ckpt.tree_match("ckpt", {"w": jnp.ones(3)})
        assert match.ok
        assert (match.nbytes, match.requests) == (12, 1)
        print(match)
        ```
    """

    leaves: Mapping[str, LeafMatch]
    nbytes: int
    requests: int
    host_bytes: int
    least_host_bytes: int

    @property
    def problems(self) -> dict[str, LeafMatch]:
        """The leaves that stop a restore."""
        return problems_of(self.leaves)

    @property
    def ok(self) -> bool:
        """Whether the restore would succeed, if each `filter_spec` of yours does."""
        return not problems_of(self.leaves)

    def __str__(self) -> str:
        counts = Counter([leaf.status for leaf in self.leaves.values()])
        summary = (
            ", ".join(f"{n} {status}" for status, n in counts.items()) or "no leaf"
        )
        differing = {
            name: leaf
            for name, leaf in self.leaves.items()
            if leaf.status != "same" or leaf.replicated
        }
        requests = f"{self.requests} request{'s' * (self.requests != 1)}"
        memory = f"{-(-self.host_bytes // 2**20)} MiB of host memory"
        cost = f"{self.nbytes} bytes to read in {requests}, with {memory}."
        return "\n".join([f"{summary}; {cost}", *describe(differing)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (name, leaf.status, str(leaf.expected), str(leaf.found))
            for name, leaf in self.leaves.items()
            if leaf.status != "same"
        ]
        head = escape(str(self).splitlines()[0])
        columns = ("leaf", "status", "in `like`", "in the checkpoint")
        return f"<p>{head}</p>{table_html(columns, rows)}" if rows else f"<p>{head}</p>"


def problems_of(leaves: Mapping[str, LeafMatch]) -> dict[str, LeafMatch]:
    """The leaves that stop a restore."""
    return {n: m for n, m in leaves.items() if m.status not in _HARMLESS}


def with_place(match: LeafMatch, place: Place) -> LeafMatch:
    if place.problem:
        return match._replace(status="sharding", expected=place.problem)
    return match._replace(replicated=place.dropped) if place.dropped else match


_BY_PARTS = (
    "Pass `transform=eqx_ckpt.rename({...})`, or restore such a part by itself, with "
    "its name there as `prefix`."
)


def describe(leaves: Mapping[str, LeafMatch]) -> list[str]:
    """One line for all that were renamed together, or that differ in the same way.

    Of many such lines, the first ones stand for all.
    """
    lines, rest = _renamed(leaves)
    if len(lines) > _MOST_LINES:
        more = f"- And {len(lines) - _MOST_LINES} more parts that seem to be renamed."
        lines[_MOST_LINES:] = [more]
    counts: Counter[Status] = Counter()
    left: Counter[Status] = Counter()
    for names, leaf in _alike(rest):
        counts[leaf.status] += 1
        if counts[leaf.status] > _MOST_LINES:
            left[leaf.status] += len(names)
            continue
        several = f"{len(names)} leaves such as " if len(names) > 1 else ""
        lines.append(f"- {several}{names[0]!r}: {printable(_sentence(leaf))}")
    lines += [
        f"- And {n} more leaves that are {_STATUS[status]}."
        for status, n in left.items()
    ]
    return lines


def _alike(leaves: Mapping[str, LeafMatch]) -> Iterator[tuple[list[str], LeafMatch]]:
    """The names of many leaves that differ in the same way; else, each by itself.

    Their names are the same but for the positions in them.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    group_of: dict[str, list[str]] = {}
    for name, leaf in leaves.items():
        sentence = _QUOTED.sub(_without_positions, _sentence(leaf))
        key = _POSITION.sub("*", name), sentence
        group_of[name] = groups.setdefault(key, [])
        group_of[name].append(name)
    for name, names in group_of.items():
        if len(names) <= _MOST_ALIKE:
            yield [name], leaves[name]
        elif name == names[0]:
            yield names, leaves[name]


def _without_positions(quoted: re.Match[str]) -> str:
    return _POSITION.sub("*", quoted[0])


def _renamed(
    leaves: Mapping[str, LeafMatch],
) -> tuple[list[str], Mapping[str, LeafMatch]]:
    """What to say of leaves that were renamed together, and the others."""
    nearest = {n: leaf.nearest[0] for n, leaf in leaves.items() if leaf.nearest}
    lines: list[str] = []
    listed: set[str] = set()
    for change, names in renamed(nearest):
        name, other = next(iter(names.items()))
        from_below = other == f"{change.after}/{name}"
        way = f"Pass `prefix={change.after!r}`." if from_below else _BY_PARTS
        if change.before and change.after and not from_below:
            pattern = {_SPECIAL.sub(r"\\\g<0>", change.after): change.before}
            way = f"Pass `transform=eqx_ckpt.rename({pattern})`."
        place = "the checkpoint"
        if leaves[name].found == UNRETURNED:
            place, way = "what `transform` returns", "Return them under these names."
        lines.append(
            f"- {len(names)} leaves seem to be renamed: {name!r} in `like`, {other!r} "
            f"in {place}, and so on. {way}"
        )
        listed.update(names, names.values())
    return lines, {n: leaf for n, leaf in leaves.items() if n not in listed}


def _sentence(leaf: LeafMatch) -> str:
    if leaf.status == "missing":
        return f"{leaf.expected} in `like`, {_absent(leaf)}"
    if leaf.status in ("abstract", "kept"):
        how = "kept from" if leaf.status == "kept" else "without a value in"
        is_there = isinstance(leaf.found, LeafRecord) or leaf.computed
        found = f"{_found(leaf)}." if is_there else _absent(leaf)
        if leaf.status == "kept" and is_there and _are_numbers(leaf):
            return f"{_value(leaf.expected)} kept from `like`, {_in_checkpoint(leaf)}."
        return f"{leaf.expected} {how} `like`, {found}"
    if leaf.status in ("unexpected", "ignored"):
        expected = "not" if leaf.expected == "nothing" else leaf.expected
        ignored = "ignored: " if leaf.status == "ignored" else ""
        return f"{ignored}{expected} in `like`, {_found(leaf)}."
    if leaf.status == "custom":
        return f"left to its `filter_spec`: {leaf.expected} in `like`, {_found(leaf)}."
    if leaf.status in ("renamed", "computed"):
        return f"{_found(leaf)}."
    if leaf.status == "sharding":
        return f"{leaf.found}: {leaf.expected}."
    if leaf.replicated:
        axes = ", ".join(map(repr, leaf.replicated))
        return f"{leaf.found}: replicated, not sharded, over {axes}."
    if leaf.status == "value":
        values = f"{_value(leaf.expected)} in `like`, {_in_checkpoint(leaf)}"
        return f"different value: {values}."
    words = _WORDS.get(leaf.status, f"different {leaf.status}")
    differs = leaf.status in ("dtype", "kind")
    way = _allowed_by(leaf.expected, leaf.found) if differs else ""
    return f"{words}: {leaf.expected} in `like`, {_found(leaf)}.{way}"


def _absent(leaf: LeafMatch) -> str:
    """That there is no such leaf, and what there is instead."""
    meant = did_you_mean(leaf.nearest)
    if leaf.found != UNRETURNED:
        found = f" ({leaf.found})" if leaf.found != "nothing" else ""
        return f"not in the checkpoint{found}.{meant}"
    if leaf.origin:
        names = ", ".join(map(repr, leaf.origin))
        meant += f" The checkpoint has {names}, which `transform` does not use."
    return f"not in what `transform` returns.{meant}"


def _found(leaf: LeafMatch) -> str:
    """What there is for a leaf, in the words of the checkpoint."""
    if not leaf.computed:
        name = "".join(f", as {name!r}" for name in leaf.origin)
        return f"{leaf.found} in the checkpoint{name}"
    if isinstance(leaf.found, str):
        return leaf.found  # Why it cannot be computed.
    names = ", ".join(map(repr, leaf.origin[:_MOST_ORIGINS]))
    more = len(leaf.origin) - _MOST_ORIGINS
    names += f" and {more} more" if more > 0 else ""
    return f"{leaf.found} that `transform` makes" + (f" of {names}" if names else "")


def _allowed_by(expected: LeafRecord | str, found: LeafRecord | str) -> str:
    """The word of `casting` that would allow it."""
    if isinstance(expected, str) or isinstance(found, str):
        return ""
    word = next(
        (w for w in WORDS if not isinstance(becomes(expected, found, w), str)), ""
    )
    return word and f" `casting={word!r}` allows it."


def _are_numbers(leaf: LeafMatch) -> bool:
    """Whether both are Python numbers, whose values are known."""
    return all(
        isinstance(x, LeafRecord) and x.kind in SCALAR_KINDS
        for x in (leaf.expected, leaf.found)
    )


def _in_checkpoint(leaf: LeafMatch) -> str:
    return f"{_value(leaf.found)} in the checkpoint"


def _value(leaf: LeafRecord | str) -> str:
    return str(leaf.value if isinstance(leaf, LeafRecord) else leaf)


_WORDS: Mapping[Status, str] = {
    "changed": "not saved, and changed",
    "same": "same",
    "cast": "cast",
    "kept": "kept",
    "ignored": "ignored",
}


_STATUS: Mapping[Status, str] = {
    "missing": "missing",
    "unexpected": "not in `like`",
    "kind": "of a different kind",
    "shape": "of a different shape",
    "dtype": "of a different dtype",
    "sharding": "not to be sharded so",
    "loader": "of a different loader",
    "changed": "not saved, and changed",
    "same": "replicated",
    "renamed": "renamed",
    "computed": "computed",
    "cast": "cast",
    "value": "of a different value",
    "custom": "left to a `filter_spec`",
    "kept": "kept",
    "ignored": "ignored",
    "abstract": "without a value to keep",
}


_MOST_LINES = 20


_MOST_ALIKE = 3


_POSITION = re.compile(r"\d+")


# In regular expressions.
_SPECIAL = re.compile(r"[.+]")


_QUOTED = re.compile(r"'[^']*'")


_MOST_ORIGINS = 3
