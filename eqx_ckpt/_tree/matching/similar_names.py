"""Names that are almost those of the checkpoint: misspelt ones, renamed parts."""

import bisect
import difflib
import itertools
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from unicodedata import normalize

from ..._format.leaf_names import encode_component


# Suggestions are for a reader, and the names may be anybody's.
_MOST_NAMES = 100_000


_MOST_ASKED = 50


_LONGEST = 1000


_DEEPEST = 32


# Parts that are looked for as a whole, which is fast, before their leaves are.
_MOST_PARTS = 4


class Index:
    """Finds similar names without comparing all of them.

    Those that share the longest beginning with a name are its neighbours in order, and
    those that share the longest end are so when all are written backwards.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._forwards = sorted(names)
        self._backwards = sorted(name[::-1] for name in names)

    def nearest(self, name: str) -> tuple[str, ...]:
        """The most similar names, best first."""
        around = _around(self._forwards, name)
        around += [n[::-1] for n in _around(self._backwards, name[::-1])]
        return tuple(difflib.get_close_matches(name[:_LONGEST], {*around}, n=3))


def _around(names: list[str], name: str, reach: int = 6) -> list[str]:
    i = bisect.bisect(names, name)
    return [n for n in names[max(i - reach, 0) : i + reach] if len(n) <= _LONGEST]


def similar(missing: Iterable[str], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For missing names those of `names` that may be meant, best first.

    All that were renamed together are found; of the others, the first ones are.
    """
    asked = [name for name in missing if len(name) <= _LONGEST][:_MOST_NAMES]
    known = sorted([name for name in names if len(name) <= _LONGEST])[:_MOST_NAMES]
    if not known:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for _, together in renamed(_pairs(asked, known)):
        found |= {name: (other,) for name, other in together.items()}
    alone = (name for name in asked if name not in found)
    first = list(itertools.islice(alone, _MOST_ASKED))
    index = Index(known) if first else None
    return found | {name: index.nearest(name) for name in first if index}


class Change(NamedTuple):
    """What differs between two names: the keys between equal beginnings and ends."""

    before: str
    after: str


def renamed(pairs: Mapping[str, str]) -> list[tuple[Change, dict[str, str]]]:
    """Names with the same change, if there are several; no two became the same."""
    changes: dict[Change, dict[str, str]] = defaultdict(dict)
    before, after, together = "", "", changes[Change("", "")]
    for name, other in pairs.items():
        if not name.startswith(before) or other != after + name[len(before) :]:
            before, after, change = _split(name, other)
            together = changes[change]
        together[name] = other
    taken: set[str] = set()
    found: list[tuple[Change, dict[str, str]]] = []
    for change, together in sorted(changes.items(), key=lambda x: -len(x[1])):
        others = {*together.values()}
        if len(together) == len(others) > 1 and taken.isdisjoint(others):
            taken |= others
            found.append((change, together))
    return found


class _Split(NamedTuple):
    """Two names up to the end that they share, and the change between them."""

    before: str
    after: str
    change: Change

    def of(self, names: Iterable[str]) -> dict[str, str]:
        """What names became that were renamed in the same way."""
        start = len(self.before)
        return {n: self.after + n[start:] for n in names if n.startswith(self.before)}


def _split(before: str, after: str) -> _Split:
    a, b = before.split("/"), after.split("/")
    most, start = min(len(a), len(b)), 0
    while start < most and a[start] == b[start]:
        start += 1
    end = 0
    while end < most - start and a[-1 - end] == b[-1 - end]:
        end += 1
    a, b = a[: len(a) - end], b[: len(b) - end]
    change = Change("/".join(a[start:]), "/".join(b[start:]))
    return _Split("".join(f"{k}/" for k in a), "".join(f"{k}/" for k in b), change)


def _pairs(asked: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """For each name the one with the longest common end, and then beginning.

    A few names are compared with all; most others were renamed in the same way.
    """
    pairs: dict[str, str] = {}
    there = {*known}
    for _ in range(_MOST_PARTS):
        if not asked:
            break
        first, *others = asked
        pairs[first] = _partner(first, known)
        moved = _split(first, pairs[first]).of(others)
        pairs |= {name: other for name, other in moved.items() if other in there}
        asked = [name for name in others if name not in pairs]
    return pairs | _same_ends(asked, known) if asked else pairs


def _partner(name: str, known: Sequence[str]) -> str:
    """As `_same_ends`, for one name."""
    at = 0
    for _ in range(_DEEPEST):
        at = name.find("/", at) + 1
        if not at:
            break
        end = name[at:]
        others = [o for o in known if o.endswith(end) and f"/{o}".endswith(f"/{end}")]
        if others:
            return _nearest(name, others)
    return _nearest(name, known)


def _same_ends(asked: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    by_end: dict[int, list[str]] = defaultdict(list)
    for name in known:
        for end in _ends(name):
            by_end[end].append(name)
    return {
        name: _nearest(name, next(by_end[end] for end in _ends(name) if end in by_end))
        for name in asked
    }


def _nearest(name: str, others: Sequence[str]) -> str:
    """Of names in order, the one with the longest common beginning."""
    i = bisect.bisect(others, name)
    return max(
        others[max(i - 1, 0) : i + 1],
        key=lambda other: len(os.path.commonprefix([name, other])),
    )


def _ends(name: str) -> Iterator[int]:
    """Hashes of what a name ends with, from all of it to nothing."""
    yield hash(name)
    at = 0
    for _ in range(_DEEPEST):
        at = name.find("/", at) + 1
        if not at:
            break
        yield hash(name[at:])
    yield hash("")


def instead_of(name: str, names: Sequence[str]) -> str:
    """What may be meant by a name that is not there, or what is there."""
    below = [other for other in names if other.startswith(f"{name}/")]
    if nearest := below[:3] or _spelled(name, names) or Index(names).nearest(name):
        return did_you_mean(nearest)
    shown = [repr(other) for other in names if len(other) <= _LONGEST][:3]
    shown += ["..."] if len(names) > len(shown) else []
    return f" There is {', '.join(shown)}." if names else " It has no leaves."


def _spelled(name: str, names: Sequence[str]) -> list[str]:
    """Names that have other characters escaped, or differ in letter case alone."""
    meant = {
        "/".join(encode_component(normalize(form, part), False) for part in parts)
        for form in ("NFC", "NFD")
        for parts in [name.split("/")]
    }
    found = [other for other in names if other in meant]
    return found or [other for other in names if other.lower() == name.lower()][:3]


def did_you_mean(names: Sequence[str]) -> str:
    return f" Did you mean {', '.join(map(repr, names))}?" if names else ""
