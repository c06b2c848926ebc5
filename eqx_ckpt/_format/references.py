"""Which chunks of a step lie in earlier attempts of its run, in a store."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from .chunk_grid import chunk_count, chunk_keys
from .leaf_record import LeafRecord


# By the name of a leaf, for each of its chunks in C order, the prefix of the attempt
# below the run; empty for a chunk of the step's own attempt.
References: TypeAlias = Mapping[str, tuple[str, ...]]


# A key of a run whose steps may refer to each other.
INCREMENTAL = "incremental"


# How the keys begin by which an attempt says what it may refer to.
PIN = "refers."


# The key of an attempt by which a manager says that it removes what nothing refers to.
SWEPT = "swept"


_ATTEMPT = re.compile(r"(?:[0-9]{6}|[1-9][0-9]{6,18})/@[0-9a-f]{32}/")


_AT_END = re.compile(rf"(?:^|/)({_ATTEMPT.pattern})$")


def attempt_at(path: str) -> str:
    """The prefix below its run of the attempt of a step at a path; `''` for others."""
    found = _AT_END.search(path)
    return found[1] if found else ""


def pin_of(attempts: Iterable[str]) -> tuple[str, bytes]:
    """The key and the value by which an attempt says what it may refer to."""
    value = "".join(f"{attempt}\n" for attempt in sorted(attempts)).encode()
    return PIN + hashlib.sha256(value).hexdigest()[:16], value


def pinned_by(value: bytes) -> set[str]:
    """The attempts that a pin names; `ValueError` if it is damaged."""
    attempts = value.decode("ascii").splitlines()
    if not all(map(_ATTEMPT.fullmatch, attempts)):
        raise ValueError(f"{value[:80]!r} names no attempts")
    return {*attempts}


def attempts_of(references: References) -> list[str]:
    """The attempts that references name, each once."""
    every = (attempt for of_leaf in references.values() for attempt in of_leaf)
    return [attempt for attempt in dict.fromkeys(every) if attempt]


def keys_referred_to(
    leaves: Mapping[str, LeafRecord], references: References
) -> set[str]:
    """The keys, below the run, of the chunks that lie in earlier attempts."""
    found: set[str] = set()
    for name, attempts in references.items():
        record = leaves[name]
        keys = chunk_keys(record.data_shape, record.chunk_shape)
        pairs = zip(attempts, keys, strict=True)
        found.update(f"{attempt}{name}/{key}" for attempt, key in pairs if attempt)
    return found


def references_to_text(references: References) -> str:
    """Serialise references as a field, one leaf per line; nothing if there are none."""
    if not references:
        return ""
    attempts = attempts_of(references)
    numbers: dict[str, int | None] = {"": None}
    numbers.update((attempt, i) for i, attempt in enumerate(attempts))
    lines: list[str] = []
    for name, of_leaf in references.items():
        found = [numbers[attempt] for attempt in of_leaf]
        is_one = len({*found}) == 1
        lines.append(f'\n"{name}": {json.dumps(found[0] if is_one else found)}')
    chunks = ",".join(lines)
    return (
        f'"references": {{"attempts": {json.dumps(attempts)}, "chunks": {{{chunks}}}}}'
    )


def references_from_json(
    value: Any, root: str, leaves: Mapping[str, LeafRecord]
) -> References:
    """The references of a manifest; `ValueError` if it can have no such ones."""
    if type(value) is not dict or value.keys() != {"attempts", "chunks"}:
        raise ValueError("its references are malformed")
    attempts, chunks = value["attempts"], value["chunks"]
    if type(attempts) is not list or type(chunks) is not dict or not chunks:
        raise ValueError("its references are malformed")
    for attempt in attempts:
        if type(attempt) is not str or not _ATTEMPT.fullmatch(attempt):
            raise ValueError(f"it refers to {str(attempt)[:80]!r}, outside of its run")
        if root and attempt.endswith(f"/{root}"):
            raise ValueError("it refers to itself")
    if len({*attempts}) != len(attempts):
        raise ValueError("its references name an attempt twice")
    found = {
        name: _of_leaf(name, leaves.get(name), numbers, attempts)
        for name, numbers in chunks.items()
    }
    if {*attempts} != {*attempts_of(found)}:
        raise ValueError("its references name an attempt that has none of its chunks")
    return found


def _of_leaf(
    name: str, record: LeafRecord | None, numbers: Any, attempts: list[str]
) -> tuple[str, ...]:
    problem = f"the references of leaf {name[:200]!r} are wrong"
    if record is None or not record.is_array or 0 in record.data_shape:
        raise ValueError(problem)
    count = chunk_count(record.data_shape, record.chunk_shape)
    of_leaf = numbers if type(numbers) is list else [numbers] * count
    for number in of_leaf:
        is_number = type(number) is int and 0 <= number < len(attempts)
        if number is not None and not is_number:
            raise ValueError(problem)
    if len(of_leaf) != count or {*of_leaf} == {None}:
        raise ValueError(problem)
    return tuple(["" if number is None else attempts[number] for number in of_leaf])
