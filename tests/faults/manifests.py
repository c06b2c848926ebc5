"""Manifests that this package would not write, with the digests that belong to them."""

import copy
import hashlib
import json
import random
import re
from collections.abc import Callable
from typing import Any

from tests.support import decode


def sealed(manifest: bytes) -> bytes:
    """The manifest with the digest that belongs to it, see docs/format.md."""
    pattern = rb'("digest": ")[0-9a-f]{64}(")'
    blank = re.sub(pattern, rb"\g<1>" + b"0" * 64 + rb"\2", manifest, count=1)
    digest = hashlib.sha256(blank).hexdigest().encode()
    return re.sub(pattern, rb"\g<1>" + digest + rb"\2", blank, count=1)


def edited(manifest: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The manifest with other content, in the same layout, and its right digest.

    In what is edited, each leaf has a dictionary with all that is said of it.
    """

    def edit_records(content: dict[str, Any]) -> None:
        types = content.pop("types")
        leaves = content["leaves"].items()
        content["leaves"] = {name: _record(name, leaf, types) for name, leaf in leaves}
        edit(content)
        content["types"] = types = []
        if isinstance(leaves := content.pop("leaves", None), dict):
            leaves = {name: _leaf(record, types) for name, record in leaves.items()}
        content["leaves"] = leaves

    return rewritten(manifest, edit_records)


def rewritten(manifest: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The manifest with other JSON, in the same layout, and its right digest."""
    content = json.loads(manifest)["attributes"]["eqx_ckpt"]
    edit(content)
    parts = {"format_version": 1, "digest": "0" * 64} | content
    lines = [f"{json.dumps(key)}: {json.dumps(parts[key])}" for key in parts]
    document = '{"zarr_format": 3, "node_type": "group", "attributes": {"eqx_ckpt": {\n'
    return sealed((document + ",\n".join(lines) + "\n}}}\n").encode())


def _record(name: str, leaf: list[Any], types: list[Any]) -> dict[str, Any]:
    number, path, text = leaf
    record = copy.deepcopy(types[number])
    keys = [[kind, token] for kind, token in decode(name, path)]
    if "dtype" not in record:
        return record | {"path": keys, "value": text}
    stored = {"data_type": record["dtype"], "data_shape": record["shape"]}
    return stored | record | {"path": keys, "checksums": text}


def _leaf(record: Any, types: list[Any]) -> Any:
    if not isinstance(record, dict):
        return record
    try:
        path = "".join(kind[0] for kind, _ in record["path"])
    except (TypeError, IndexError, KeyError, ValueError):
        path = record.get("path")
    types.append({k: v for k, v in record.items() if k not in _OF_A_LEAF})
    return [len(types) - 1, path, record.get("value", record.get("checksums"))]


_OF_A_LEAF = ("path", "value", "checksums")


_VALUES = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**40, 2**62, 2**63, 10**30, 0.5, 1e308),
    *("", "a", "..", "/", "../..", "zarr.json", "float32", "int4", "key", "\ud800"),
    *("jax", "numpy", "bool", "complex", "nan:", "1e999", "0x", "@root", "00000000"),
    *([], {}, [[]], [0], [1], [2**40], [-1], ["attr", "a"], [["key", ".."]], {"a": 1}),
]


Place = tuple[Any, Any]  # a list or dictionary, and an index or a key


def _places(value: Any) -> list[Place]:
    """Everything in a JSON document that can be changed."""
    keys = range(len(value)) if isinstance(value, list) else list(value)
    inner = [value[k] for k in keys if isinstance(value[k], dict | list)]
    return [(value, k) for k in keys] + [p for v in inner for p in _places(v)]


def _mutate(choices: random.Random, content: dict[str, Any]) -> None:
    """Make one random change."""
    container, key = choices.choice(_places(content))
    donor, other = choices.choice(_places(content))
    change = choices.choice(["delete", "rename", "copy", "value", "value"])
    if change == "delete":
        del container[key]
    elif change == "rename" and isinstance(container, dict):
        container[str(other)] = container.pop(key)
    elif change == "copy":
        container[key] = copy.deepcopy(donor[other])
    else:
        container[key] = copy.deepcopy(choices.choice(_VALUES))


def mutant(manifest: bytes, seed: int) -> bytes:
    """The manifest with one to three random changes, and its right digest."""
    choices = random.Random(seed)

    def edit(content: dict[str, Any]) -> None:
        for _ in range(choices.randint(1, 3)):
            _mutate(choices, content)

    return choices.choice([edited, rewritten])(manifest, edit)
