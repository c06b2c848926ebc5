"""A source: named records, and their data, region by region."""

import abc
import functools as ft
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple, TYPE_CHECKING

from .._errors import CheckpointError, CorruptCheckpointError
from .._lazy import Array, np
from .._types import Report
from .chunk_grid import batches, Region, shape_of
from .leaf_record import LeafRecord
from .manifest import Manifest


if TYPE_CHECKING:
    import jax


# Bytes read before they are copied.
_BATCH = 32 * 2**20


class RegionRead(NamedTuple):
    """A request to a [`eqx_ckpt.interop.Source`][] for a region of the array of a leaf.

    **Attributes:**

    - `name`, `record`: those of the leaf, as in the manifest's `leaves`.
    - `region`: a `slice` with a start and a stop for each axis of `record.data_shape`.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        eqx_ckpt.tree_serialise_leaves("ckpt", {"w": jnp.arange(6.0)})
        record = eqx_ckpt.inspect.read_manifest("ckpt").leaves["w"]
        read = eqx_ckpt.interop.RegionRead("w", record, (slice(0, 2),))
        source = eqx_ckpt.interop.open_source("ckpt")
        [found] = source.read([read], {})
        assert found.tolist() == [0, 1]
        ```
    """

    name: str
    record: LeafRecord
    region: Region

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the region."""
        return shape_of(self.region)

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return math.prod(self.shape) * self.record.itemsize


class Source(abc.ABC):
    """Named records, and their data, region by region.

    A checkpoint is a source. To restore from anything else, derive from this class:
    every function that takes the path of a checkpoint takes a source too. Error
    messages call the source `str(source)`.

    !!! example

        ```python
        import eqx_ckpt
        import numpy as np

        class NpyFiles(eqx_ckpt.interop.Source):
            def __init__(self, files):
                self._arrays = {n: np.load(f, mmap_mode="r") for n, f in files.items()}

            @property
            def manifest(self):
                return eqx_ckpt.inspect.Manifest(
                    {
                        name: eqx_ckpt.inspect.LeafRecord.of_array(
                            array.shape, array.dtype, path=(("key", name),)
                        )
                        for name, array in self._arrays.items()
                    }
                )

            def read(self, reads, damage, report=None):
                return [np.array(self._arrays[r.name][r.region]) for r in reads]

            def __str__(self):
                return "some NumPy files"

        np.save("w.npy", np.ones(3, np.float32))
        source = NpyFiles({"w": "w.npy"})
        like = eqx_ckpt.tree_like(source)
        tree = eqx_ckpt.tree_deserialise_leaves(source, like)
        assert tree["w"].shape == (3,)
        ```
    """

    @property
    @abc.abstractmethod
    def manifest(self) -> Manifest:
        """The [`eqx_ckpt.inspect.Manifest`][]: all leaves, before any data are read.

        The name of each leaf is that of its `path`: the keys joined by `/`, escaped as
        `docs/format.md` says.
        """

    @abc.abstractmethod
    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[Array]:
        """Read regions.

        **Arguments:**

        - `reads`: the [`eqx_ckpt.interop.RegionRead`][]s.
        - `damage`: a dictionary. If a leaf is damaged, add a description under the
            leaf's name: the caller then ignores the leaf's arrays, and raises one error
            for all damaged leaves.
        - `report`: if not `None`, call `report(name, nbytes)` when `nbytes` more bytes
            of a leaf have been read.

        **Returns:**

        A new array for each region, in order, with the shape of the region and the
        dtype `record.data_type`, in the byte order of this machine.
        """

    def read_into(
        self,
        reads: Sequence[RegionRead],
        targets: Sequence[Array],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> None:
        """Read regions into arrays that are there, such as parts of a larger one.

        A source that can do so without a copy overrides this.

        **Arguments:**

        - `reads`, `damage`, `report`: as for `read`.
        - `targets`: contiguous arrays, as `read` returns them.
        """
        pairs = zip(reads, targets, strict=True)
        for batch in batches(pairs, lambda pair: pair[0].nbytes, _BATCH):
            asked = [read for read, _ in batch]
            arrays = self.read(asked, damage, report)
            if damage:
                continue
            _check(self, asked, arrays)
            for (_, target), array in zip(batch, arrays, strict=True):
                target[...] = array

    def held(self, name: str) -> "jax.Array | None":
        """The JAX array of a leaf, if the source holds it in memory; it is not read
        then.

        **Arguments:**

        - `name`: the name of the leaf.

        **Returns:**

        The array (of PRNG keys, too), or `None` if the leaf has to be read.
        """
        return None

    @property
    def has_checksums(self) -> bool:
        """Whether every array is compared with a checksum when it is read.

        `False` unless a source overrides it: then [`eqx_ckpt.inspect.verify`][] can
        find that data are missing, but not that they are other data.
        """
        return False

    def has_changed(self) -> bool:
        """Whether what was opened has been replaced or removed since.

        What looks damaged then is only of a different version, and the error says so.
        `False` unless a source overrides it.
        """
        return False

    @property
    def version(self) -> str:
        """A text that is the same in all processes of a job that have opened the same.

        If the texts differ, a restore by several processes raises. `""`, unless a
        source overrides it.
        """
        return ""

    @abc.abstractmethod
    def __str__(self) -> str: ...


def read_regions(
    source: Source, reads: Sequence[RegionRead], report: Report | None = None
) -> list[Array]:
    """Read regions; raise one error for all damaged leaves."""
    damage: dict[str, str] = {}
    arrays = read_or_note(source, reads, damage, report)
    if damage:
        arrays.clear()  # Who keeps the error would keep them.
    raise_damage(damage, source)
    return arrays


def read_or_note(
    source: Source,
    reads: Sequence[RegionRead],
    damage: dict[str, str],
    report: Report | None = None,
) -> list[Array]:
    """Read regions; put damaged leaves, whose arrays mean nothing, into `damage`."""
    # NumPy returns a scalar, not an array, for a region of an array without axes.
    arrays = [np.asarray(array) for array in source.read(reads, damage, report)]
    _check(source, reads, arrays, damage)
    return arrays


def nothing(read: RegionRead) -> Array:
    """An array in the place of one that is damaged; it is not used."""
    return np.empty(read.shape, read.record.data_type)


def _check(
    source: Source,
    reads: Sequence[RegionRead],
    arrays: Sequence[Array],
    damage: Collection[str] = (),
) -> None:
    """Raise unless a source returned what it was asked for, of undamaged leaves."""
    if len(arrays) != len(reads):
        raise CheckpointError(
            f"{source} returned {len(arrays)} arrays for {len(reads)} regions."
        )
    # NumPy puts a name together each time, and leaves the byte order out.
    name_of = ft.cache(lambda dtype: dtype.name if dtype.isnative else dtype.str)
    for (name, record, region), array in zip(reads, arrays, strict=True):
        shape = shape_of(region)
        is_wrong = array.shape != shape or name_of(array.dtype) != record.data_type
        if is_wrong and name not in damage:
            raise CheckpointError(
                f"{source} returned {array.dtype}{list(array.shape)} for a region of "
                f"leaf {name!r} that is {record.data_type}{list(shape)}."
            )


def raise_damage(damage: dict[str, str], source: Source) -> None:
    if damage and source.has_changed():
        raise CheckpointError(
            f"{source} was replaced or removed while its leaves were read. Begin again."
        )
    if damage:
        raise CorruptCheckpointError(
            f"{source} is damaged. These leaves are not what was saved:\n"
            + "\n".join(f"- {name!r}: {reason}." for name, reason in damage.items())
            + "\nUse another checkpoint. A restore can choose leaves that are intact "
            "with `where` or `filter_spec`."
        )
