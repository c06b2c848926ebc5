"""Manifests that this package would not write, with the digests that belong to them."""

import copy
import hashlib
import json
import random
import re
from collections.abc import Callable
from typing import Any


def sealed(manifest: bytes) -> bytes:
    """The manifest with the digest that belongs to it, see docs/format.md."""
    pattern = rb'("digest": ")[0-9a-f]{64}(")'
    blank = re.sub(pattern, rb"\g<1>" + b"0" * 64 + rb"\2", manifest, count=1)
    digest = hashlib.sha256(blank).hexdigest().encode()
    return re.sub(pattern, rb"\g<1>" + digest + rb"\2", blank, count=1)


def edited(manifest: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The manifest with other content, in the same layout, and its right digest."""
    document = json.loads(manifest)
    content = document["attributes"]["eqx_ckpt"]
    edit(content)
    version = content.pop("format_version", None)
    digest = content.pop("digest", "0" * 64)
    consolidated = {"consolidated_metadata": document["consolidated_metadata"]}
    return sealed(
        b'{"zarr_format": 3, "node_type": "group", "attributes": {"eqx_ckpt": {\n'
        b'"format_version": %b,\n"digest": "%b",\n%b},\n%b'
        % tuple(
            text.encode(errors="surrogatepass")
            for text in (
                json.dumps(version),
                digest if isinstance(digest, str) else json.dumps(digest),
                json.dumps(content)[1:],
                json.dumps(consolidated)[1:],
            )
        )
    )


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

    return edited(manifest, edit)
