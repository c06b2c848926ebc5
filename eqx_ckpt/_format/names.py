"""Turn JAX key paths into names; no other module does.

The encoding is injective, readable, and safe on every file system and object store;
`docs/format.md` describes it for readers in other languages.
"""

import functools as ft
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any, TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from .._errors import LeafNameError
from .._types import IsLeaf, KeyPath, TypedPath
from .lazy import eqx, jtu, np
from .transient import is_transient


if TYPE_CHECKING:
    from jaxtyping import PyTree


ROOT = "@root"
EMPTY = "@empty"
# By the name of JAX's class of the key.
_KINDS = {
    "GetAttrKey": ("attr", "name"),
    "SequenceKey": ("index", "idx"),
    "FlattenedIndexKey": ("index", "key"),
    "DictKey": ("key", "key"),
}
_CUT = re.compile(r"@[0-9a-f]{32}(/|\Z)")
_LETTERS = {"a": "attr", "i": "index", "k": "key"}
_MAX_COMPONENT = 200
_INT = re.compile(r"-?(0|[1-9][0-9]*)\Z")
_SAFE = re.compile(r"[A-Za-z0-9_.+=,-]*\Z")
_ENCODED = re.compile(r"[A-Za-z0-9_.+=,%@/-]+\Z")
# What file systems and Zarr have another use for.
_RESERVED = re.compile(
    r"zarr\.json\Z|(con|prn|aux|nul|com\d|lpt\d)(\.|\Z)", re.IGNORECASE | re.ASCII
)


def _is_whole(node: Any) -> bool:
    return isinstance(node, eqx.nn.State) or is_transient(node)


def key_paths(tree: "PyTree", is_leaf: IsLeaf = None) -> list[tuple[KeyPath, Any]]:
    """Every leaf with its key path, in the order of `jax.tree_util.tree_leaves`.

    Like `jax.tree_util.tree_flatten_with_path`, except that the keys of an
    `eqx.nn.State` are its markers, since positions change when a layer is inserted. A
    `Transient` is one leaf.
    """
    # Called for each node: a builtin is several times faster than a function.
    is_state = ft.partial(type.__instancecheck__, eqx.nn.State)
    is_plain = is_leaf in (None, is_transient) and not any(
        any(map(is_one, jtu.tree_leaves(tree, is_one)))
        for is_one in (is_state, is_transient)
    )
    if is_plain:
        # Twice as fast without a function that is called on every node.
        return jtu.tree_flatten_with_path(tree)[0]
    return list(_key_paths(tree, is_leaf))


def _key_paths(tree: "PyTree", is_leaf: IsLeaf) -> Iterator[tuple[KeyPath, Any]]:
    stop = _is_whole if is_leaf is None else lambda x: is_leaf(x) or _is_whole(x)
    for path, node in jtu.tree_flatten_with_path(tree, stop)[0]:
        if not isinstance(node, eqx.nn.State) or (
            is_leaf is not None and is_leaf(node)
        ):
            yield path, node
            continue
        children: Iterable[Any]
        markers: Any
        children, markers = node.tree_flatten()
        for i, (child, marker) in enumerate(zip(children, markers, strict=True)):
            key = jtu.DictKey(_undecorated(marker) if isinstance(marker, str) else i)
            for rest, leaf in key_paths(child, is_leaf):
                yield (*path, key, *rest), leaf


def typed(path: KeyPath, start: int = 0) -> TypedPath:
    """A key path as data: `(("attr", "layers"), ("index", 0), ("key", "a/b"))`."""
    return tuple([_typed(key, path) for key in path[start:]])


def _typed(key: Any, path: KeyPath) -> tuple[str, str | int]:
    kind, field = _KINDS.get(type(key).__name__, ("key", None))
    token = getattr(key, field) if field else key
    if type(token) is not str and type(token) is not int:
        token = _plain(token, path)
    return kind, token


def joined(path: TypedPath, separators: str) -> tuple[str, ...]:
    """What is left of a key path in a format that joins keys, and splits them again.

    The keys become texts; those with one of the `separators` in them are split there.
    """
    texts = [str(key) for _, key in path]
    if not separators:
        return tuple(texts)
    text = separators[0].join(texts)
    return tuple(re.split(f"[{re.escape(separators)}]", text))


class Namer:
    """Names the leaves of one tree; fast if many leaves are in one folder."""

    def __init__(self) -> None:
        # The keys of the last leaf's folder, each with the node below it.
        self._keys: KeyPath = ()
        self._folders: list[tuple[str, TypedPath]] = [("", ())]

    def __call__(self, path: KeyPath) -> tuple[str, TypedPath]:
        """The name of a leaf, and its key path as data."""
        if not path:
            return ROOT, ()
        if len(path) - 1 != len(self._keys) or not all(map(is_, self._keys, path)):
            same = map(is_, self._keys, path[:-1])
            depth = len([*itertools.takewhile(bool, same)])
            del self._folders[depth + 1 :]
            folder, above = self._folders[-1]
            for key in path[depth:-1]:
                token = _typed(key, path)
                folder = f"{folder}{_component(token[1], False)}/"
                above = (*above, token)
                self._folders.append((folder, above))
            self._keys = path[:-1]
        folder, above = self._folders[-1]
        last = _typed(path[-1], path)
        return folder + _component(last[1], False), (*above, last)


def _plain(token: Any, path: KeyPath) -> str | int:
    """The string or integer equal to a key such as a `StrEnum` or an `np.int64`."""
    if isinstance(token, str):
        return str.__str__(token)
    if isinstance(token, int | np.integer) and not isinstance(token, bool):
        return int(token)
    raise LeafNameError(
        f"The key {token!r} of type `{type(token).__name__}` in the path "
        f"`{jtu.keystr(path)}` cannot be part of a leaf's name: only strings and "
        "integers can. Use such keys in the PyTree."
    )


def is_encoded(name: str) -> bool:
    """Whether a text has only characters that names have."""
    return _ENCODED.match(name) is not None


def encode(path: TypedPath, *, uncut: bool = False) -> str:
    """The name of a leaf: one component for each key, joined by `/`.

    With `uncut`, long components are not shortened to what file systems allow.
    """
    return "/".join([_component(token, uncut) for _, token in path]) or ROOT


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
    if _component(token, True) != part or kind not in _LETTERS:
        raise ValueError(f"{part[:50]!r} is not part of a name")
    return _LETTERS[kind], token


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


def check_distinct(named: Sequence[tuple[KeyPath, str]]) -> None:
    """Raise `LeafNameError` if two names are equal, or one is inside the other."""
    leaves: dict[str, tuple[KeyPath, str]] = {}
    clashes: list[str] = []
    for path, name in named:
        first = leaves.setdefault(name, (path, name))
        if first[0] is not path:
            clashes.append(_clash(first, (path, name)))
    for folder in leaves.keys() & folders(leaves):
        inside = next(leaf for leaf in leaves if leaf.startswith(folder + "/"))
        clashes.append(_clash(leaves[folder], leaves[inside]))
    if clashes:
        raise LeafNameError(
            "Leaves of the PyTree do not have distinct names:\n"
            + "\n".join(f"- {clash}" for clash in sorted(clashes))
            + "\nA leaf has a directory of its own, in which no other leaf can be: "
            "rename one of each."
        )


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


def _clash(a: tuple[KeyPath, str], b: tuple[KeyPath, str]) -> str:
    return (
        f"`{jtu.keystr(a[0])}`, stored as {a[1]!r}, and "
        f"`{jtu.keystr(b[0])}`, stored as {b[1]!r}."
    )


def _undecorated(marker: str) -> str:
    """`Net.layers[1].norm.state_index` -> `layers.1.norm.state_index`.

    The class is dropped so that renaming it does not rename the leaves.
    """
    without_class = re.sub(r"^\w+(?=[.\[])", "", marker)
    return re.sub(r"\[(\d+)\]", r".\1", without_class).removeprefix(".")


@ft.lru_cache(maxsize=65536, typed=True)
def _component(token: str | int, uncut: bool) -> str:
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
