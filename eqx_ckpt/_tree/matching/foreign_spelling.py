"""Leaves of `like` in formats that do not keep all of a key path."""

from collections import Counter
from collections.abc import Iterable

from ..._format.leaf_names import is_below, joined
from ..._format.manifest import Manifest
from ..._types import TypedPath


def spelled(
    manifest: Manifest, leaves: Iterable[tuple[str, TypedPath]], prefix: str = ""
) -> dict[str, str]:
    """The names under which a source has leaves of `like` that it lacks by their own.

    The key `"0"` of a dictionary, for example, may have become the position 0, and the
    key `"a.b"` two keys. Two leaves that became the same are not restored.
    """
    if manifest.separators is None:
        return {}
    names = dict(leaves)
    if all(name in manifest.leaves for name in names):
        return {}
    paths = (r.path for n, r in manifest.leaves.items() if is_below(prefix, n))
    above = next(paths, ())[: prefix.count("/") + 1] if prefix else ()
    there = {
        joined(record.path, manifest.separators): name
        for name, record in manifest.leaves.items()
        if name not in names
    }
    absent = {
        name: joined((*above, *path), manifest.separators)
        for name, path in names.items()
        if name not in manifest.leaves
    }
    counts = Counter(absent.values())
    return {
        name: there[keys]
        for name, keys in absent.items()
        if keys in there and counts[keys] == 1
    }


def respelled(first: Manifest, second: Manifest) -> dict[str, str]:
    """What leaves of one source are called in another one that lacks their names.

    Each of the two may be of a format that does not keep all of a key path.
    """
    there = {n: r for n, r in first.leaves.items() if n not in second.leaves}
    back = {n: r for n, r in second.leaves.items() if n not in first.leaves}
    if not there or not back:
        return {}
    inverse = spelled(first, ((n, r.path) for n, r in back.items()))
    found = {name: other for other, name in inverse.items()}
    return found | spelled(second, ((n, r.path) for n, r in there.items()))
