"""Commands for checkpoints."""

import dataclasses
from typing import Any

import eqx_ckpt

from .._format.lazy import Array, np
from .._format.screen import in_bytes
from .._stats import stats_and_damage
from .._storage.reading import opened
from .._tree.nested import checked_prefix
from ._output import number, printable, say, say_json, table
from ._tree import grown, label, lines, parameters
from ._values import differences, leaf_named, split_index


_MOST_VALUES = 1000


def tree(path: str, prefix: str, depth: int | None, as_json: bool) -> int:
    manifest = eqx_ckpt.read_manifest(path)
    root = grown(manifest, prefix := checked_prefix(prefix, manifest))
    if not as_json:
        say(f"{printable(path)}{'/' if prefix else ''}{prefix}  {label(root)}")
        for line in lines(root, depth):
            say(line)
        return 0
    below = prefix + "/" if prefix else ""
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
        }
        for name, record in manifest.leaves.items()
        if name == prefix or name.startswith(below)
    ]
    totals = {"nbytes": root.nbytes, "numbers": root.numbers}
    about = {"metadata": manifest.metadata, "versions": dict(manifest.versions)}
    say_json({"path": path, "prefix": prefix} | totals | about | {"leaves": leaves})
    return 0


def show(path: str, text: str, as_json: bool) -> int:
    name, index = split_index(text)
    record, value = leaf_named(path, name)
    try:
        part = np.asarray(value)[index] if index else np.asarray(value)
    except IndexError as e:
        raise eqx_ckpt.CheckpointError(f"{name!r} is {record}: {e}.") from None
    found = eqx_ckpt.stats(path, prefix=name)[name]
    counts, edges = _histogram(_finite(part))
    if as_json:
        shown = part if part.size <= _MOST_VALUES else None
        if shown is not None and shown.dtype.kind in "mM":
            shown = shown.astype(str)
        elif shown is not None and shown.dtype.kind not in "biufcO":
            shown = shown.astype(np.float64)
        values = None if shown is None else np.asarray(shown).tolist()
        histogram = {"counts": counts, "edges": edges}
        about = {"path": path, "name": name, "type": str(record), "values": values}
        say_json(about | {"stats": dataclasses.asdict(found), "histogram": histogram})
        return 0
    say(f"{name}  {record}  {in_bytes(record.nbytes)}")
    for key, stat in dataclasses.asdict(found).items():
        say(f"{key:>6}  {number(stat)}")
    say(np.array2string(part, threshold=100))
    most = max(counts, default=0)
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        bar = "█" * round(30 * count / most)
        say(f"{number(low):>12} .. {number(high):>12}  {count:>9}  {bar}")
    return 0


def _histogram(wide: Array) -> tuple[list[int], list[float]]:
    """Counts and edges of ten bins, or of one if the range is too small or too
    large."""
    if wide.size == 0:
        return [], []
    low, high = float(wide.min()), float(wide.max())
    if not 1e-9 * max(abs(low), abs(high)) < high - low < np.inf:
        return [wide.size], [low, high]
    counts, edges = np.histogram(wide, 10)
    return counts.tolist(), edges.tolist()


def _finite(part: Array) -> Array:
    """The finite numbers of an array, as floats."""
    if part.dtype.kind in "cmM":
        return np.empty(0)
    wide = part.astype(np.float64).reshape(-1)
    return wide[np.isfinite(wide)]


def stats(path: str, prefix: str, as_json: bool) -> int:
    damage: dict[str, str] = {}
    found = stats_and_damage(opened(path), prefix, damage)
    bad = [name for name, leaf in found.items() if leaf.nan or leaf.inf]
    if as_json:
        leaves = [{"name": n} | dataclasses.asdict(leaf) for n, leaf in found.items()]
        say_json({"path": path, "leaves": leaves, "damage": damage})
    else:
        fields = [field.name for field in dataclasses.fields(eqx_ckpt.LeafStats)]
        rows = [
            [n, *(number(getattr(leaf, field)) for field in fields), ""]
            for n, leaf in found.items()
        ]
        for line in table(["leaf", *fields, ""], rows):
            say(line)
        for name in bad:
            say(f"NaN or infinity: {name}")
        for name, problem in damage.items():
            say(printable(f"damaged: {name}: {problem}"))
    return 1 if bad or damage else 0


def diff(a: str, b: str, values: bool, as_json: bool) -> int:
    damage: dict[str, str] = {}
    found = list(differences(a, b, values, damage))
    found.sort(key=lambda entry: -entry.get("max_abs", float("inf")))
    if as_json:
        same = not found and not damage
        about: dict[str, Any] = {"a": a, "b": b, "compared_values": values}
        say_json(about | {"same": same, "leaves": found, "damage": damage})
        return 0 if same else 1
    for entry in found:
        text = f"{entry['name']}: {entry['status']}"
        if "count" in entry:
            far = f"at most {number(entry['max_abs'])}"
            share = f"relative {number(entry['max_rel'])}"
            say(f"{text}: {entry['count']} differ, {far}, {share}")
        elif entry["a"] and entry["b"]:
            say(f"{text}: {entry['a']}, {entry['b']}")
        else:
            say(f"{text}: {entry['a'] or entry['b']}")
    for problem in damage.values():
        say(printable(problem))
    return 1 if found or damage else 0
