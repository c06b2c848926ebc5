"""Turn JAX key paths into names; no other module does.

The encoding is injective, readable, and safe on every file system and object store;
`docs/format.md` describes it for readers in other languages.
"""

import functools as ft
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import unquote_to_bytes

from .._types import KeyPath, TypedPath


ROOT = "@root"


EMPTY = "@empty"


# By the name of JAX's class of the key.
KEY_KINDS = {
    "GetAttrKey": ("attr", "name"),
    "SequenceKey": ("index", "idx"),
    "FlattenedIndexKey": ("index", "key"),
    "DictKey": ("key", "key"),
}


_CUT = re.compile(r"@[0-9a-f]{32}(/|\Z)")


_LETTERS = {"a": "attr", "i": "index", "k": "key"}


_MAX_COMPONENT = 200


# More than JAX takes apart, and than Python's recursion limit.
MAX_LEVELS = 1000


_INT = re.compile(r"-?(0|[1-9][0-9]*)\Z")


_SAFE = re.compile(r"[A-Za-z0-9_.+=,-]*\Z")


_ENCODED = re.compile(r"[A-Za-z0-9_.+=,%@/-]+\Z")


# What means something else to file systems or to Zarr.
_RESERVED = re.compile(
    r"zarr\.json\Z|(con|prn|aux|nul|com\d|lpt\d)(\.|\Z)", re.IGNORECASE | re.ASCII
)


def joined(path: TypedPath, separators: str) -> tuple[str, ...]:
    """What is left of a key path in a format that joins keys, and splits them again.

    The keys become texts; those with one of the `separators` in them are split there.
    """
    texts = [str(key) for _, key in path]
    if not separators:
        return tuple(texts)
    text = separators[0].join(texts)
    return tuple(re.split(f"[{re.escape(separators)}]", text))


def is_encoded(name: str) -> bool:
    """Whether a text has only characters that names have."""
    return _ENCODED.match(name) is not None


def encode(path: TypedPath, *, uncut: bool = False) -> str:
    """The name of a leaf: one component for each key, joined by `/`.

    With `uncut`, long components are not shortened to what file systems allow.
    """
    return "/".join([encode_component(token, uncut) for _, token in path]) or ROOT


def is_cut(name: str) -> bool:
    """Whether a component of a name was shortened, so that its keys are lost."""
    return _CUT.search(name) is not None


def decode(name: str, kinds: str) -> TypedPath:
    """The key path of an uncut name; `kinds` has the initial of each key's kind.

    `ValueError` if no key path has this name.
    """
    parts = [] if name == ROOT else name.split("/")
    if len(parts) != len(kinds):
        raise ValueError("its path is another leaf's")
    return tuple(map(_decoded, kinds, parts))


class Decoder:
    """Decodes the names of one checkpoint; fast if many leaves are in one folder."""

    def __init__(self) -> None:
        self._folder = "", ""
        self._above: TypedPath = ()

    def __call__(self, name: str, kinds: str) -> TypedPath:
        above, _, last = name.rpartition("/")
        folder = above, kinds[:-1]
        if not above or not kinds:
            return decode(name, kinds)
        if folder != self._folder:
            self._above, self._folder = decode(*folder), folder
        return (*self._above, _decoded(kinds[-1], last))


@ft.lru_cache(maxsize=65536)
def _decoded(kind: str, part: str) -> tuple[str, str | int]:
    token: str | int
    if _INT.match(part):
        token = int(part)
    else:
        text = "" if part == EMPTY else part
        token = unquote_to_bytes(text).decode("utf-8", "surrogatepass")
    if encode_component(token, True) != part or kind not in _LETTERS:
        raise ValueError(f"{part[:50]!r} is not part of a name")
    return _LETTERS[kind], token


def check_path(name: str, path: TypedPath) -> None:
    """Raise `ValueError` unless a leaf of this path has this name."""
    if (expected := encode(path)) != name:
        raise ValueError(f"its `path` has the name {expected!r}")
    if len(path) > MAX_LEVELS:
        raise ValueError(too_many_levels(path))
    if decode(encode(path, uncut=True), "".join([kind[0] for kind, _ in path])) != path:
        raise ValueError("its `path` is not one of a leaf")


def below(prefix: str, name: str) -> str:
    """The full name of the leaf called `name` below `prefix`."""
    if not prefix:
        return name
    return prefix if name == ROOT else f"{prefix}/{name}"


def from_below(prefix: str, name: str) -> str:
    """The inverse of `below`: what the leaf is called there."""
    if not prefix:
        return name
    return ROOT if name == prefix else name[len(prefix) + 1 :]


def is_below(prefix: str, name: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix + "/")


def folders(names: Iterable[str]) -> set[str]:
    """All parents of the names: `{"a", "a/b"}` for `["a/b/c"]`."""
    found: set[str] = set()
    for name in names:
        folder = name.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found


def inside_others(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pairs: a name, and one inside of it, for which it is the closest.

    Unlike `folders`, this makes no text for each level of a name.
    """
    above: list[str] = []
    folders = sorted([f"{name}/" for name in names])
    # What is inside of a name, if anything, begins with the next one in order.
    if not any(map(str.startswith, folders[1:], folders)):
        return
    for folder in folders:
        while above and not folder.startswith(above[-1]):
            above.pop()
        if above:
            yield above[-1][:-1], folder[:-1]
        above.append(folder)


def too_many_levels(path: TypedPath | KeyPath) -> str:
    """Why no leaf can have more than `MAX_LEVELS` keys."""
    return f"it is nested {len(path)} levels deep, and {MAX_LEVELS} is the limit"


def alike(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of names with a part that differs only by letter case: `a/Wq` and `a/wq`.

    There is one pair for each two folders or leaves of one parent.
    """
    nodes = folders(names).union(names)
    if len({node.lower() for node in nodes}) == len(nodes):
        return []
    # A leaf of each node, by its parent and its last key in small letters.
    seen: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        for node in (*folders([name]), name):
            parent, _, last = node.rpartition("/")
            seen.setdefault((parent, last.lower()), {}).setdefault(node, name)
    groups = ([*leaf_of.values()] for leaf_of in seen.values())
    return sorted((first, other) for first, *others in groups for other in others)


@ft.lru_cache(maxsize=65536, typed=True)
def encode_component(token: str | int, uncut: bool) -> str:
    if token == "":
        return EMPTY
    out = str(token)
    if isinstance(token, str):
        out = token if _SAFE.match(token) else "".join(map(_escape, token))
        is_special = _INT.match(out) or _RESERVED.match(out)
        if is_special or out[0] == "." or out.startswith("__"):
            out = _percent(out[0]) + out[1:]
        if out[-1] == ".":
            out = out[:-1] + "%2E"
        if out.lower().endswith(".__lock"):
            out = out[:-7] + "%2E" + out[-6:]
    if len(out) > _MAX_COMPONENT and not uncut:
        digest = hashlib.sha256(out.encode()).hexdigest()[:32]
        out = re.sub(r"%[0-9A-F]?\Z", "", out[:167]) + "@" + digest
    return out


def _escape(character: str) -> str:
    return character if _SAFE.match(character) else _percent(character)


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))
