"""What a custom `filter_spec` makes of a leaf, and leaves that are never saved."""

from typing import Any

from ..._errors import LeafMismatchError
from ..._format.leaf_record import LeafRecord
from ..._types import Spec
from ..leaves.casting import becomes
from ..leaves.filter_spec import LeafReader, restored_by
from ..leaves.leaf_kinds import describe_like, fingerprint
from ..matching.leaf_match import LeafMatch
from .write_plan import NamedLeaf


def custom_without_record(
    leaf: NamedLeaf, spec: Spec, found: str
) -> tuple[Any, LeafMatch]:
    """What a spec makes of a leaf that is not saved; it cannot read it.

    `found` is what is known of it.
    """
    handed_on: list[Any] = []

    def restore(like: Any) -> Any:
        if describe_like(like) is not None:
            raise _NotThere
        handed_on.append(like)
        return like

    now = describe_like(leaf.leaf) or fingerprint(leaf.leaf)
    try:
        f = LeafReader(leaf.name, leaf.path, _not_there, restore)
        value = restored_by(spec, f, leaf.leaf)
    except _NotThere:
        return leaf.leaf, LeafMatch("missing", now, found)
    check_returned(value, leaf.leaf, leaf.name)
    if handed_on:
        return value, never_saved(handed_on[-1], found)
    return value, LeafMatch("custom", now, found)


def never_saved(like: Any, found: str) -> LeafMatch:
    """A leaf such as a function: it stays as it is, but it may have changed."""
    now = fingerprint(like)
    same = found in (now, "nothing") or found.startswith("skipped: ")
    return LeafMatch("same" if same else "changed", now, found)


def check_returned(value: Any, like: Any, name: str) -> None:
    """Raise if a spec returned a different kind of leaf, as Equinox does."""
    same_type = type(value) is type(like)
    expected, found = describe_like(like), describe_like(value)
    if expected is None or found is None:
        problem = () if same_type else (fingerprint(value), fingerprint(like))
    else:
        # A `np.memmap` becomes an array, and `np.longlong` has a name of its own.
        same_type |= expected.is_array or expected.kind == "struct"
        same = same_type and (
            _is_as_it_was(expected, found) or becomes(expected, found, "no") is found
        )
        problem = () if same or value is like else (found, expected)
    if problem:
        raise LeafMismatchError(
            f"The `filter_spec` returned {problem[0]} for leaf {name!r}, which is "
            f"{problem[1]} in `like`. Return a leaf of the same type, shape and dtype."
        )


def _is_as_it_was(expected: LeafRecord, found: LeafRecord) -> bool:
    """Whether it has the kind, dtype, shape and `impl`, also if JAX would narrow it."""
    kind = "jax" if expected.kind == "struct" else expected.kind
    return found[:4] == (kind, *expected[1:4])


def _not_there() -> bytes:
    raise _NotThere


class _NotThere(LeafMismatchError):
    pass
