"""The leaves of a checkpoint as a tree with subtotals."""

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from .._format.display import in_bytes
from .._format.leaf_names import is_below
from .._format.leaf_record import LeafRecord
from .._format.manifest import Manifest
from .._inspecting.same_content import same_content
from .._sources.checkpoint_source import opened
from .._tree.matching.name_tree import checked_prefix
from .command_sources import found_at
from .terminal import say, say_json, Styled


def tree(path: str, prefix: str, depth: int | None, since: str, as_json: bool) -> int:
    manifest = opened(found_at(path)).manifest
    prefix = checked_prefix(prefix, manifest)
    earlier = opened(found_at(since)).manifest.leaves if since else {}
    same = same_content(manifest.leaves, earlier)
    root = grown(manifest, prefix, same)
    if not as_json:
        top = f"{path.rstrip('/')}/{prefix}" if prefix else path
        say(Styled(top, "bold"), "  ", *label(root))
        for line in lines(root, depth):
            say(*line)
        return 0
    leaves = [
        {
            "name": name,
            "kind": record.kind,
            "dtype": record.dtype,
            "shape": list(record.shape),
            "nbytes": record.nbytes,
            "numbers": parameters(record),
            "sharding": record.sharding,
            "value": record.value,
            "same": name in same if since else None,
        }
        for name, record in manifest.leaves.items()
        if is_below(prefix, name)
    ]
    unsaved = {n: why for n, why in manifest.unsaved.items() if is_below(prefix, n)}
    totals = {"nbytes": root.nbytes, "numbers": root.numbers}
    about = {"metadata": manifest.metadata, "versions": dict(manifest.versions)}
    found = {"leaves": leaves, "unsaved": unsaved}
    given = {"path": path, "prefix": prefix, "since": since or None}
    say_json(given | totals | about | found)
    return 0


@dataclass
class Node:
    """A leaf, or a folder of leaves; `unsaved` says what was left out in its place.

    `same`: how many of the leaves are equal to those of an earlier checkpoint.
    """

    nbytes: int = 0
    numbers: int = 0
    leaves: int = 0
    same: int = 0
    record: LeafRecord | None = None
    unsaved: str | None = None
    children: dict[str, "Node"] = field(default_factory=lambda: {})


def parameters(record: LeafRecord) -> int:
    """The number of numbers in a leaf."""
    return math.prod(record.shape) if record.kind != "bytes" else 0


def grown(manifest: Manifest, prefix: str, same: Set[str] = frozenset()) -> Node:
    """Build the tree of what is below a name."""
    root = Node()
    for name, record in manifest.leaves.items():
        if is_below(prefix, name):
            nodes = _way_to(root, name[len(prefix) :])
            nodes[-1].record = record
            for node in nodes:
                node.nbytes += record.nbytes
                node.numbers += parameters(record)
                node.leaves += 1
                node.same += name in same
    for name, why in manifest.unsaved.items():
        if is_below(prefix, name):
            _way_to(root, name[len(prefix) :])[-1].unsaved = why
    return root


def _way_to(root: Node, name: str) -> list[Node]:
    """The nodes from the root to a name; those that are missing are made."""
    nodes = [root]
    for part in filter(None, name.split("/")):
        nodes.append(nodes[-1].children.setdefault(part, Node()))
    return nodes


def lines(root: Node, depth: int | None) -> Iterator[list[str | Styled]]:
    """A line for each node, down to a depth."""
    # A name may have more parts than Python's own stack has room for.
    waiting = _below(root, "")
    while waiting:
        indent, name, child, is_last = waiting.pop()
        corner, below = ("└── ", "    ") if is_last else ("├── ", "│   ")
        yield [indent, corner, Styled(name, "bold"), "  ", *label(child)]
        deeper = indent + below
        if depth is None or len(deeper) < depth * len(below):
            waiting += _below(child, deeper)


def _below(node: Node, indent: str) -> list[tuple[str, str, Node, bool]]:
    """The children of a node, the last one first."""
    items = reversed(node.children.items())
    return [(indent, name, child, not i) for i, (name, child) in enumerate(items)]


def label(node: Node) -> list[str | Styled]:
    """The text beside the name of a node, the most important first."""
    text = _about(node)
    is_same = bool(node.leaves) and node.same == node.leaves
    return [*text, "  ", Styled("unchanged", "dim")] if is_same else text


def _about(node: Node) -> list[str | Styled]:
    record = node.record
    if node.unsaved is not None:
        return [Styled(f"left out: {node.unsaved}", "dim")]
    if record is None or node.children:
        size = Styled(in_bytes(node.nbytes), "cyan")
        counts = f"{_count(node.numbers, 'number')} in {_count(node.leaves, 'leaf')}"
        return [size, "  ", counts]
    if record.value is not None:
        return [f"{record} = {record.value}"]
    size = Styled(in_bytes(record.nbytes), "cyan")
    text = [Styled(str(record), "green"), "  ", size]
    return [*text, "  ", Styled(where, "dim")] if (where := sharding(record)) else text


def _count(number: int, word: str) -> str:
    plural = {"leaf": "leaves"}.get(word, f"{word}s")
    return f"{number:,} {word if number == 1 else plural}"


def sharding(record: LeafRecord) -> str:
    """How a leaf was sharded: the mesh axes of each dimension, and the mesh."""
    if record.sharding is None:
        return ""
    parts = ["-" if p is None else str(p) for p in record.sharding["spec"]]
    axes = zip(
        record.sharding["axis_names"], record.sharding["mesh_shape"], strict=True
    )
    mesh = ", ".join(f"{name}={size}" for name, size in axes)
    return f"sharded ({', '.join(parts)}) on ({mesh})"
