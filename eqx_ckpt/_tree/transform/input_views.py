"""Parts of the inputs of a `transform`, each as a leaf of its own."""

from ..._format.leaf_record import LeafRecord
from .arrangement import View


def whole_view(number: int, record: LeafRecord) -> View:
    return View.whole(number, record.shape, (record.data_shape, record.chunk_shape))


def view_name(view: View, name: str, record: LeafRecord) -> str:
    """How a view of a leaf is written: no leaf has a bracket in its name."""
    parts = [
        str(start)
        if axis not in view.axes
        else ":"
        if (start, stop) == (0, record.shape[axis])
        else f"{start}:{stop}"
        for axis, (start, stop) in enumerate(view.spans)
    ]
    while parts[-1:] == [":"]:
        parts.pop()
    return f"{name}[{', '.join(parts)}]"


def view_record(view: View, record: LeafRecord) -> LeafRecord:
    """The record of a view of a leaf, as if that were a leaf."""
    more = len(record.shape)
    shape = view.shape
    axes = (*view.axes, *range(more, len(record.data_shape)))
    data_shape = (*shape, *record.data_shape[more:])
    chunks = [record.chunk_shape[axis] for axis in axes]
    sharding = record.sharding
    if sharding is not None:
        spec = dict(enumerate(sharding["spec"]))
        sharding = {**sharding, "spec": [spec.get(axis) for axis in view.axes]}
    return record._replace(
        # A part of what a `filter_spec` wrote is no file.
        kind="numpy" if record.kind == "bytes" else record.kind,
        shape=shape,
        data_shape=data_shape,
        chunk_shape=tuple(chunks),
        sharding=sharding,
        checksums=(),
    )
