"""What is read for a leaf: it itself, or the leaves that it is computed from."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from ..._errors import LeafMismatchError
from ..._format.chunk_grid import batches
from ..._format.leaf_record import LeafRecord, tag_and_data_type
from ..._types import KeyPath, Spec
from ..leaves.leaf_kinds import is_key
from ..matching.sharding_argument import automatic, computed_on, Place, spread
from .transform_argument import Derived, Origin
from .transform_trace import Computation


# Leaves are computed together if they read at most this much, or the same inputs.
_TOGETHER = 64 * 2**20


_SHARE = 10


class Read(NamedTuple):
    """One leaf to be restored, at `position` among the leaves of `like`.

    `record` is what the checkpoint has, `becomes` what it is to be. `origin`: where it
    comes from if there is a `transform`.
    """

    position: int
    name: str
    path: KeyPath
    like: Any
    spec: Spec | None
    record: LeafRecord
    becomes: LeafRecord
    place: Place
    origin: Origin | None = None

    @property
    def is_computed(self) -> bool:
        return self.origin is not None and self.origin.output is not None


class Part(NamedTuple):
    """Leaves that are computed together.

    `inputs`: what is read for that, by the names in the checkpoint.
    `constants`: what the `transform` had from elsewhere.
    `shardings`: of the `outputs` as they are computed; `None` leaves it to XLA.
    """

    outputs: Sequence[Read]
    inputs: Sequence[Read]
    computation: Computation
    constants: Sequence[Any]
    shardings: Sequence[Sharding | None]

    @property
    def nbytes(self) -> int:
        return sum(read.record.nbytes for read in self.inputs)

    @property
    def is_shared(self) -> bool:
        """Whether several processes compute it together; all of them find the same."""
        return any(
            len({device.process_index for device in sharding.device_set}) > 1
            for sharding in self.placed
        )

    @property
    def has_devices(self) -> bool:
        """Whether this process has some of the devices that compute it."""
        return all(x.addressable_devices for x in self.placed)

    @property
    def placed(self) -> list[Sharding]:
        """The shardings of all inputs and outputs."""
        inputs = [read.place.sharding for read in self.inputs]
        return [x for x in (*self.shardings, *inputs) if x is not None]


_Devices = tuple[Any, ...] | None


def parts_of(derived: Derived, reads: Iterable[Read]) -> list[Part]:
    """Group leaves into parts, so that no two parts read the same input.

    Small ones are computed together too: each computation is compiled.
    """
    reads = [read for read in reads if read.is_computed]
    limit = max(_TOGETHER, sum(read.becomes.nbytes for read in reads) // _SHARE)
    on: dict[_Devices, list[Read]] = {}
    for read in reads:
        on.setdefault(_devices(read), []).append(read)
    return [
        _part(derived, [read for group in groups for read in group], devices)
        for devices, alike in on.items()
        for groups in batches(
            _connected(derived, alike), lambda group: _nbytes(derived, group), limit
        )
    ]


def _nbytes(derived: Derived, reads: Iterable[Read]) -> int:
    names = {name for read in reads for name in _names(read)}
    return sum(derived.inputs[name].nbytes for name in names)


def _names(read: Read) -> tuple[str, ...]:
    return () if read.origin is None else read.origin.names


def _connected(derived: Derived, reads: Sequence[Read]) -> list[list[Read]]:
    """Group leaves, so that no two groups read the same leaf of the checkpoint."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root.setdefault(name, name) != name:
            root[name] = name = root[root[name]]
        return name

    used = [derived.leaves_of(read.origin) if read.origin else [] for read in reads]
    for names in used:
        for name in names:
            root[find(name)] = find(names[0])
    groups: dict[str | int, list[Read]] = {}
    for read, names in zip(reads, used, strict=True):
        key = find(names[0]) if names else read.position
        groups.setdefault(key, []).append(read)
    return [*groups.values()]


def _devices(read: Read) -> _Devices:
    """The devices that a leaf is computed on, in order; `None`: the default one."""
    sharding = read.place.sharding
    mesh: Any = getattr(sharding, "mesh", read.place.target)
    if read.becomes.kind not in ("jax", "key"):
        return None
    if isinstance(mesh, Mesh):
        return tuple(mesh.devices.flat)
    if sharding is None:
        return None
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _part(derived: Derived, outputs: Sequence[Read], devices: _Devices) -> Part:
    places = [read.place for read in outputs]
    mesh = computed_on(devices, places)
    numbers = [r.origin.output for r in outputs if r.origin is not None]
    computation = derived.traced.part([n for n in numbers if n is not None])
    names = [*derived.inputs]
    position = derived.traced.position
    inputs = [
        Read(
            i,
            name,
            (),
            None,
            None,
            record,
            _as_input(record),
            _on(devices, mesh, record),
        )
        for i, name in ((i, names[position(i)]) for i in computation.inputs)
        for record in [derived.inputs[name]]
    ]
    constants = [
        _there(value, devices, mesh) for value in computation.constants.values()
    ]
    shardings = [_computed_as(read, devices, mesh) for read in outputs]
    return Part(outputs, inputs, computation, constants, shardings)


def _as_input(record: LeafRecord) -> LeafRecord:
    """A leaf of the checkpoint, as the computation takes it."""
    if record.kind == "key":
        return record
    tag, data_type = tag_and_data_type(np.dtype(record.dtype).newbyteorder("="))
    return record._replace(kind="jax", dtype=tag, data_type=data_type, weak_type=False)


def _on(devices: _Devices, mesh: Mesh | None, record: LeafRecord) -> Place:
    if mesh is not None:
        return Place(None, spread(mesh, record))
    return Place(None, SingleDeviceSharding(devices[0]) if devices else None)


def _computed_as(read: Read, devices: _Devices, mesh: Mesh | None) -> Sharding | None:
    """The sharding of a leaf, in the default memory."""
    if mesh is None:
        return SingleDeviceSharding(devices[0]) if devices else None
    sharding = read.place.sharding
    if isinstance(sharding, NamedSharding):
        return automatic(sharding)
    is_new = not _names(read)
    return NamedSharding(mesh, PartitionSpec()) if is_new else None


def _there(value: Any, devices: _Devices, mesh: Mesh | None) -> Any:
    """A constant of a `transform`, on the devices of the computation."""
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return value
    if not value.committed or (devices is None and value.devices() == _default()):
        return value if is_key(value) else np.asarray(value)
    if value.devices() != {*(devices or _default())}:
        raise LeafMismatchError(
            f"`transform` uses an array, {value.dtype}{list(value.shape)}, that is not "
            f"in the checkpoint, on other devices than the leaves that it is for: "
            f"{value.sharding}. Use a NumPy array, such as `jax.device_get` of it, or "
            "put it on their devices with `jax.device_put`."
        )
    if mesh is None or not isinstance(value.sharding, NamedSharding):
        return value
    return jax.device_put(value, NamedSharding(mesh, value.sharding.spec))


def _default() -> set[Any]:
    return jax.numpy.zeros(()).devices()
