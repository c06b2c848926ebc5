"""The leaves that a `transform` returns, unchanged or computed from other leaves."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .._format.chunk_grid import whole
from .._format.leaf_record import from_stored, SCALAR_KINDS
from .._format.source import read_regions, RegionRead, Source
from .._tree.leaves.leaf_kinds import is_key
from .._tree.matching.sharding_argument import Place
from .._tree.plans.match_leaf import of_type
from .._tree.transform.transform_argument import Derived
from .._tree.transform.transform_parts import Part, parts_of, Read
from .._tree.transform.transform_trace import undisturbed, without_nan_checks
from .leaf_reader import Arrived, assembled, cast, How, read_leaves
from .placement import dtype_of, finished, for_xla, sharded
from .transform_source import Transformed
from .viewed_source import Viewed


class Leaves:
    """The leaves of a source, seen through a `transform` if there is one."""

    def __init__(self, source: Source, derived: Derived | None, how: How) -> None:
        self._source = source if derived is None else Viewed(source, derived)
        self._shown = source if derived is None else Transformed(source, derived)
        self._derived = derived
        self._how = how
        self._report = how.report

    def read(self, reads: Sequence[Read]) -> Arrived:
        """Read leaves that are not computed."""
        held = {r.position: x for r in reads if (x := self._held(r)) is not None}
        reads = [read for read in reads if read.position not in held]
        arrived = read_leaves(self._shown, reads, self._how)
        arrived.values.update(held)
        return arrived

    def read_inputs(self, part: Part) -> Arrived:
        return read_leaves(self._source, part.inputs, self._how)

    def computed(self, part: Part, inputs: Arrived) -> dict[int, Any]:
        """The leaves of a part, by position."""
        if self._report:
            self._report("compute")
        return compute(part, assembled(inputs))

    def _held(self, read: Read) -> jax.Array | None:
        """The array of a leaf that the source has in memory, on its new devices."""
        name = read.name
        if self._derived is not None:
            origin = self._derived.origins.get(name)
            if origin is None or origin.is_made:
                return None
            name = origin.names[0]
        array = self._source.held(name)
        if array is None or read.becomes is not read.record:
            return None
        sharding = read.place.sharding
        is_there = array.committed and sharding == array.sharding
        if sharding is None or is_there:
            return array
        with without_nan_checks():
            return sharded(jax.device_put(array, sharding), sharding)

    def value(self, read: Read) -> Any:
        """Read or compute one leaf, for a custom `filter_spec`."""
        alone = self._how._replace(broadcast_replicas=False)
        if self._derived is None or not read.is_computed:
            arrived = read_leaves(self._shown, [read], alone)
            return assembled(arrived)[read.position]
        (part,) = parts_of(self._derived, [read])
        inputs = read_leaves(self._source, part.inputs, alone)
        return self.computed(part, inputs)[read.position]

    def on_host(self, read: Read) -> np.ndarray:
        """The data of one leaf in host memory; key data for PRNG keys."""
        if read.is_computed:
            kind = "key" if read.record.kind == "key" else "numpy"
            host = read.record._replace(kind=kind, weak_type=False)
            value = self.value(read._replace(becomes=host, place=Place(None)))
            return np.asarray(jax.random.key_data(value) if is_key(value) else value)
        region = RegionRead(read.name, read.record, whole(read.record.data_shape))
        report_read = self._report and ft.partial(self._report, "read")
        (array,) = read_regions(self._shown, [region], report_read)
        return from_stored(array, read.record)


def compute(part: Part, arrays: dict[int, Any]) -> dict[int, Any]:
    """Compute the outputs of a part from its inputs, both by position."""
    if not part.has_devices:
        # JAX computes only on meshes that include a device of this process.
        return {read.position: _nothing_here(read) for read in part.outputs}
    inputs = [arrays.pop(read.position) for read in part.inputs]
    try:
        with undisturbed():
            # The next part is not read before the inputs of this one are dropped.
            results = jax.block_until_ready(_compiled(part)(part.constants, inputs))
    except Exception as e:
        names = ", ".join(repr(read.name) for read in part.outputs[:3])
        e.add_note(f"This was raised when `transform` computed {names}, ...")
        raise
    del inputs
    return {
        read.position: _as_wanted(result, read)
        for read, result in zip(part.outputs, results, strict=True)
    }


def _compiled(part: Part) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    def run(constants: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        results = part.computation(constants, inputs)
        return [
            result.astype(read.becomes.dtype) if read.becomes.kind == "jax" else result
            for read, result in zip(part.outputs, results, strict=True)
        ]

    shardings = [
        for_xla(sharding, read.becomes.shape)
        for sharding, read in zip(part.shardings, part.outputs, strict=True)
    ]
    if all(sharding is None for sharding in shardings):
        return jax.jit(run)
    return jax.jit(run, out_shardings=shardings)


def _nothing_here(read: Read) -> jax.Array:
    sharding = read.place.sharding
    if sharding is None:
        sharding = NamedSharding(read.place.target, PartitionSpec())
    return jax.make_array_from_single_device_arrays(
        read.becomes.shape, sharding, [], dtype=dtype_of(read.becomes)
    )


def _as_wanted(result: jax.Array, read: Read) -> Any:
    """Convert a computed leaf to the type, dtype and sharding that `like` asks for."""
    if read.becomes.kind in ("jax", "key"):
        sharding = read.place.sharding
        if isinstance(read.place.target, Mesh) and sharding is None:
            # XLA chose the sharding, which JAX 0.9 cannot always say by axes.
            chosen = result.sharding
            is_named = isinstance(chosen, NamedSharding)
            spec = chosen.spec if is_named else PartitionSpec()
            sharding = NamedSharding(read.place.target, spec)
        result = sharded(result, sharding)
        if sharding is not None and not _is_on(sharding, result):
            with without_nan_checks():
                result = jax.device_put(result, sharding)
        is_as_it_was = is_key(result) or result.weak_type == read.becomes.weak_type
        return result if is_as_it_was else finished(result, read.becomes)
    host = cast(np.array(result), read)
    if read.becomes.kind in SCALAR_KINDS:
        return of_type(read.like, host.item(), read.becomes.kind)
    return finished(host, read.becomes)


def _is_on(sharding: Sharding, leaf: jax.Array) -> bool:
    """Whether a leaf has a sharding, which JAX may spell in another way for keys."""
    there: Any = leaf.sharding
    if there == sharding or not (is_key(leaf) and isinstance(sharding, NamedSharding)):
        return there == sharding
    same_mesh = getattr(there, "mesh", None) == sharding.mesh
    return same_mesh and there.is_equivalent_to(sharding, leaf.ndim)
