"""The leaves of a checkpoint as a tree with subtotals."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import typer

import eqx_ckpt

from .._format.screen import in_bytes


@dataclass
class Node:
    """A leaf, or a folder of leaves."""

    nbytes: int = 0
    numbers: int = 0
    leaves: int = 0
    record: eqx_ckpt.LeafRecord | None = None
    children: dict[str, "Node"] = field(default_factory=lambda: {})


def parameters(record: eqx_ckpt.LeafRecord) -> int:
    """The number of numbers in a leaf."""
    return math.prod(record.shape) if record.kind != "bytes" else 0


def grown(manifest: eqx_ckpt.Manifest, prefix: str) -> Node:
    """Build the tree of the leaves below a name."""
    root = Node()
    for name, record in manifest.leaves.items():
        if prefix and name != prefix and not name.startswith(prefix + "/"):
            continue
        inside = name[len(prefix) :].strip("/")
        node, nodes = root, [root]
        for part in inside.split("/") if inside else []:
            node = node.children.setdefault(part, Node())
            nodes.append(node)
        node.record = record
        for one in nodes:
            one.nbytes += record.nbytes
            one.numbers += parameters(record)
            one.leaves += 1
    return root


def lines(node: Node, depth: int | None, indent: str = "") -> Iterator[str]:
    """A line for each node, down to a depth."""
    last = len(node.children) - 1
    for i, (name, child) in enumerate(node.children.items()):
        corner, below = ("└── ", "    ") if i == last else ("├── ", "│   ")
        yield f"{indent}{corner}{typer.style(name, bold=True)}  {label(child)}"
        if depth is None or depth > 1:
            deeper = None if depth is None else depth - 1
            yield from lines(child, deeper, indent + below)


def label(node: Node) -> str:
    """The text beside the name of a node."""
    record = node.record
    if record is None or node.children:
        size = typer.style(in_bytes(node.nbytes), fg="cyan")
        return f"{node.numbers:,} numbers in {node.leaves:,} leaves, {size}"
    if record.value is not None:
        return f"{record} = {record.value}"
    text = f"{typer.style(str(record), fg='green')}  {in_bytes(record.nbytes)}"
    return f"{text}  {sharded}" if (sharded := sharding(record)) else text


def sharding(record: eqx_ckpt.LeafRecord) -> str:
    """How a leaf was sharded: the mesh axes of each dimension, and the mesh."""
    if record.sharding is None:
        return ""
    parts = ["-" if p is None else str(p) for p in record.sharding["spec"]]
    axes = zip(
        record.sharding["axis_names"], record.sharding["mesh_shape"], strict=True
    )
    mesh = ", ".join(f"{name}={size}" for name, size in axes)
    return f"sharded ({', '.join(parts)}) on ({mesh})"
