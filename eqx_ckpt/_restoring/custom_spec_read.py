"""Restore a leaf through a user's own `filter_spec`."""

import io
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._errors import LeafMismatchError
from .._format.dtype_names import is_numpys
from .._format.leaf_record import scalar_from_text
from .._tree.leaves.casting import Casting, dtype_of, would_narrow
from .._tree.leaves.filter_spec import LeafReader, restored_by
from .._tree.matching.sharding_argument import place
from .._tree.plans.custom_match import check_returned
from .._tree.plans.match_leaf import match_leaf
from .._tree.transform.transform_parts import Read
from .placement import moved
from .transform_compute import Leaves


def restore_through(leaves: Leaves, read: Read, casting: Casting) -> Any:
    """Call a custom `filter_spec` for a leaf, which it may or may not read."""

    def content() -> bytes:
        if _narrows(read):
            raise LeafMismatchError(
                f"Leaf {read.name!r} is {read.record}, which JAX would narrow while "
                "x64 is off. Let the `filter_spec` call "
                "`eqx_ckpt.default_deserialise_filter_spec` for this leaf."
            )
        return _content(leaves, read)

    def restore(like: Any) -> Any:
        match, new = match_leaf(like, None, read.record, casting)
        if not match.is_harmless:
            raise LeafMismatchError(
                f"Leaf {read.name!r}: {match.expected} in the call of "
                f"`default_deserialise_filter_spec`, {match.found} in the checkpoint."
            )
        where_to = place(read.place.target, read.name, like, new)
        if where_to.problem:
            raise LeafMismatchError(f"Leaf {read.name!r}: {where_to.problem}.")
        return leaves.value(read._replace(like=like, becomes=new, place=where_to))

    f = LeafReader(read.name, read.path, content, restore)
    assert read.spec is not None
    value = restored_by(read.spec, f, read.like)
    check_returned(value, read.like, read.name)
    if value is read.like or not isinstance(value, jax.Array):
        return value
    kind = "key" if read.record.kind == "key" else "jax"
    where_to = place(
        read.place.target, read.name, read.like, read.record._replace(kind=kind)
    )
    if where_to.problem:
        raise LeafMismatchError(f"Leaf {read.name!r}: {where_to.problem}.")
    return moved(value, where_to.sharding)


def _narrows(read: Read) -> bool:
    becomes_jax = isinstance(read.like, jax.Array | jax.ShapeDtypeStruct)
    return becomes_jax and would_narrow(dtype_of(read.record))


def _content(leaves: Leaves, read: Read) -> bytes:
    """The bytes that Equinox would have written for a leaf, such as an `.npy` file."""
    f = io.BytesIO()
    if not read.record.is_array:
        eqx.default_serialise_filter_spec(
            f, scalar_from_text(read.record.kind, read.record.value or "")
        )
        return f.getvalue()
    array = leaves.on_host(read)
    if read.record.kind == "bytes":
        return array.tobytes()
    # `np.save` would write JAX's dtypes as voids; write their names.
    descr = array.dtype.str if is_numpys(array.dtype) else array.dtype.name
    header = {"descr": descr, "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(f, header)
    return f.getvalue() + array.tobytes()
