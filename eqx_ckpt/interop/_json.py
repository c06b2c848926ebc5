"""JSON of other programs: bounded, and without duplicate keys."""

import json
from typing import Any

from ._records import corrupt


# Each costs the parser up to 100 bytes.
_MAX_TOKENS = 16_000_000


def parse_object(data: bytes, where: object, format: str) -> dict[str, Any]:
    """A JSON object; raises `CorruptCheckpointError` for anything else."""
    if sum(map(data.count, (b"[", b"{", b",", b":"))) > _MAX_TOKENS:
        raise corrupt(where, format, "it has too many values")
    try:
        found = json.loads(data.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as e:
        raise corrupt(where, format, f"no JSON ({str(e)[:200]})") from None
    if not isinstance(found, dict):
        raise corrupt(where, format, "its JSON is not an object")
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{name[:200]!r} is there twice")
        entries[name] = value
    return entries
