"""The leaves of a checkpoint as nested dictionaries."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TYPE_CHECKING

from ..._errors import CheckpointError, LeafMismatchError
from ..._format.leaf_names import folders, is_below
from ..._format.leaf_record import (
    dtype_from_tag,
    key_shape,
    LeafRecord,
    scalar_from_text,
)
from ..._format.manifest import Manifest
from ..._lazy import jax
from ..._types import shown
from .similar_names import instead_of


if TYPE_CHECKING:
    from jaxtyping import PyTree


# Nested deeper, Python and JAX reach the recursion limit.
_MAX_LEVELS = 200


def checked_prefix(prefix: Any, manifest: Manifest, *, is_empty: bool = False) -> str:
    """`prefix` as a name of the checkpoint; `is_empty`: no leaf is wanted from it.

    A part without a leaf, such as an `eqx.nn.Identity`, is known by what it is in.
    """
    prefix = without_slashes(prefix)
    if not prefix:
        return prefix
    sought = prefix.rpartition("/")[0] if is_empty else prefix
    names = [*manifest.leaves, *manifest.unsaved]
    if not sought or any(is_below(sought, name) for name in names):
        return prefix
    raise LeafMismatchError(
        f"`prefix` is {prefix!r}, and the checkpoint has no leaf of that name or below "
        f"it.{instead_of(prefix, [*names, *folders(names)])}"
    )


def without_slashes(prefix: Any) -> str:
    """A `prefix` without leading and trailing slashes, which have no meaning."""
    if not isinstance(prefix, str):
        raise TypeError(
            f"`prefix` is {shown(prefix)}, which is not a string. Pass the beginning "
            'of a name, such as `prefix="model/layers"`; `""` is the whole checkpoint.'
        )
    return prefix.strip("/")


def nested(
    manifest: Manifest, prefix: str, leaf: Callable[[str, LeafRecord], Any]
) -> "PyTree":
    """Nested dictionaries of something for each leaf below `prefix`."""
    skip = prefix.count("/") + 1 if prefix else 0

    def leaves() -> Iterator[tuple[Sequence[str | int], Any]]:
        for name, record in manifest.leaves.items():
            if not is_below(prefix, name):
                continue
            keys = [token for _, token in record.path[skip:]]
            if len(keys) > _MAX_LEVELS:
                raise CheckpointError(
                    f"Leaf {name[:200]!r} would be in {len(keys)} nested dictionaries, "
                    f"and {_MAX_LEVELS} is the limit. Restore into a `like` of your "
                    "own, or a part, with a longer `prefix`."
                )
            yield keys, leaf(name, record)

    return nest(leaves())


def nest(leaves: Iterable[tuple[Sequence[str | int], Any]]) -> "PyTree":
    """Nested dictionaries of leaves, each with its keys; one without keys is itself."""
    tree: Any = {}
    for keys, leaf in leaves:
        if not keys:
            return leaf
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = leaf
    return sortable(tree)


def sortable(node: Any) -> Any:
    """JAX sorts the keys of a `dict`, and cannot sort integers among strings."""
    if not isinstance(node, dict):
        return node
    children = {key: sortable(child) for key, child in node.items()}
    return children if len(set(map(type, children))) < 2 else OrderedDict(children)


def struct_of(record: LeafRecord) -> Any:
    """A leaf without its data; a Python scalar is there itself."""
    if not record.is_array:
        return scalar_from_text(record.kind, record.value or "")
    if record.kind == "key" and key_shape(record.impl or "") is None:
        raise LeafMismatchError(
            f"The checkpoint has a {record}, which this JAX does not know. Define that "
            "PRNG implementation first, or choose other leaves with `prefix`."
        )
    if record.kind == "key":
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=record.impl)).dtype
    else:
        dtype = dtype_from_tag(record.dtype)
    return jax.ShapeDtypeStruct(record.shape, dtype, weak_type=record.weak_type)
