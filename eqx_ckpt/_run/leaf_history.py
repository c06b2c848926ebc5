"""The leaves of a run over its steps, of which parts are read when they are asked."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np

from .._errors import CheckpointNotFoundError, LeafMismatchError
from .._format.chunk_grid import Region
from .._format.leaf_record import (
    from_stored,
    LeafRecord,
    plain_dtype,
    scalar_from_text,
)
from .._format.source import read_regions, RegionRead, Source
from .._sources.checkpoint_source import Checkpoint
from .._sources.data_tree import data_tree, LazyArray
from .._steps.run_steps import as_step, Run
from .._storage.calls.threads import at_once
from .._tree.matching.similar_names import instead_of
from .._types import PathLike, shown


class LeafOverSteps:
    """One leaf of a run as an array with the steps as its first axis; read by parts.

    `leaf[-1]`, `leaf[:, 0]` and `leaf[::10, ..., :3]` read these regions, and
    `np.asarray(leaf)` all of it. Of typed PRNG keys, it has their key data.

    **Attributes:**

    - `name`: the name of the leaf.
    - `steps`: the steps along the first axis.
    - `shape`, `dtype`: those of the array, as NumPy has them.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        with eqx_ckpt.CheckpointManager("run") as manager:
            for step in (1, 2):
                manager.save(step, {"w": jnp.ones(3) * step})
        weight = eqx_ckpt.inspect.leaf_history("run")["w"]
        assert weight.shape == (2, 3)
        assert weight[:, 0].tolist() == [1, 2]
        ```
    """

    def __init__(
        self,
        name: str,
        steps: tuple[int, ...],
        found: Sequence[tuple[Source, LeafRecord]],
    ) -> None:
        self.name = name
        self.steps = steps
        self._found = found
        record = found[0][1]
        self.shape = (len(steps), *record.data_shape)
        if record.value is not None:
            self.dtype = _dtype_of(record.kind, [_number(of) for _, of in found])
        else:
            self.dtype = plain_dtype(record)

    def __getitem__(self, key: Any) -> Any:
        """A part of it, by integers, slices and `...`, as of a NumPy array."""
        keys = _whole_key(key, self.shape)
        chosen = range(len(self.steps))[keys[0]]
        pairs = [_region(k, n) for k, n in zip(keys[1:], self.shape[1:], strict=True)]
        region = tuple(one for one, _ in pairs)
        inner = tuple(rest for _, rest in pairs)
        if isinstance(chosen, int):  # Of the steps.
            return self._read(region, chosen)[inner]
        # It has the shape, and takes no memory.
        of_one = np.broadcast_to(np.empty(()), self.shape[1:])[keys[1:]]
        result = np.empty((len(chosen), *of_one.shape), self.dtype)

        def fill(place: int) -> None:
            result[place] = self._read(region, chosen[place])[inner]

        at_once(fill, range(len(chosen)) if result.size else ())
        return result

    def _read(self, region: Region, place: int) -> np.ndarray:
        source, record = self._found[place]
        if record.value is not None:
            return np.asarray(_number(record), self.dtype)
        (found,) = read_regions(source, [RegionRead(self.name, record, region)])
        return from_stored(found, record).astype(self.dtype, copy=False)

    def __len__(self) -> int:
        return len(self.steps)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[...], dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of all of it."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"<LeafOverSteps {self.name!r}: {self.dtype}[{shape}]>"


class LeafHistory(Mapping[str, LeafOverSteps]):
    """The leaves of a run by name, each over all steps.

    It has the leaves that each step has, with the same type and shape. For another one,
    `LeafMismatchError` says which steps differ.

    **Attributes:**

    - `steps`: the steps, in order.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        with eqx_ckpt.CheckpointManager("run") as manager:
            for step in (1, 2):
                manager.save(step, {"w": jnp.ones(3) * step})
        found = eqx_ckpt.inspect.leaf_history("run")
        assert ([*found], found.steps) == (["w"], (1, 2))
        ```
    """

    def __init__(self, sources: Mapping[int, Source]) -> None:
        self.steps = tuple(sources)
        self._sources = [*sources.values()]
        self._leaves = [source.manifest.leaves for source in self._sources]

    def __getitem__(self, name: str) -> LeafOverSteps:
        if problem := self._problem(name):
            raise LeafMismatchError(problem)
        records = [leaves[name] for leaves in self._leaves]
        found = [*zip(self._sources, records, strict=True)]
        return LeafOverSteps(name, self.steps, found)

    def _problem(self, name: str) -> str:
        """Why a leaf is no array over all steps, or `''`."""
        types = [_type_of(leaves.get(name)) for leaves in self._leaves]
        if types[-1] is None and not any(types):
            every = self._leaves[-1]
            return f"No step has a leaf {name!r}.{instead_of(name, [*every])}"
        others = [
            step for step, of in zip(self.steps, types, strict=True) if of != types[-1]
        ]
        if not others:
            return ""
        listed = ", ".join(map(str, others[:_MOST])) + ", ..." * (len(others) > _MOST)
        return (
            f"Leaf {name!r} is {types[-1] or 'missing'} in step {self.steps[-1]}, and "
            f"something else, or missing, in: {listed}. Pass `steps` without them."
        )

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._leaves[-1] if not self._problem(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and not self._problem(name)

    def to_datatree(self) -> Any:
        """The leaves as lazy arrays in an `xarray.DataTree`, with an axis `step`.

        A `/` in a name opens a group; the other axes are `w_dim_0`, `w_dim_1` and so on
        of a leaf `w`. The axis is `step_` if a leaf or a group is `step`, and so on.
        Only what is used of an array is read. Needs xarray:
        `pip install 'eqx-ckpt[xarray]'`.

        **Returns:**

        An `xarray.DataTree`.

        **Raises:**

        - `ImportError`: xarray is not installed.
        - [`eqx_ckpt.CheckpointError`][]: xarray cannot hold the leaves in one tree.
        """
        axis = "step"
        while any(axis in name.split("/") for name in self):
            axis += "_"
        arrays = [
            LazyArray(
                name,
                # By the whole name: xarray aligns axes of groups within each other.
                [axis, *(f"{name}_dim_{i}" for i in range(len(leaf.shape) - 1))],
                leaf.shape,
                leaf.dtype,
                leaf.__getitem__,
            )
            for name, leaf in self.items()
        ]
        axes = {axis: np.asarray(self.steps)}
        return data_tree(arrays, axes, "Read it by its name.")

    def __repr__(self) -> str:
        return f"<LeafHistory of {len(self)} leaves over {len(self.steps)} steps>"


# So many steps are named in an error.
_MOST = 10


def leaf_history(
    directory: PathLike, steps: Sequence[SupportsIndex] | None = None
) -> LeafHistory:
    """The leaves of a run over its steps, as lazy arrays.

    **Arguments:**

    - `directory`: the directory or URL of a run.
    - `steps`: which steps; the default is all of them. A manifest is read of each.

    **Returns:**

    An [`eqx_ckpt.inspect.LeafHistory`][]: a mapping from names to
    [`eqx_ckpt.inspect.LeafOverSteps`][]. Only the regions that are asked for are read,
    and verified.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no step, or one of `steps` is not
        there.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the manifest of a step is damaged.
    - [`eqx_ckpt.CheckpointError`][]: the newest checkpoint is misnamed, and `steps` is
        not given.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        with eqx_ckpt.CheckpointManager("runs/a") as manager:
            for step in (1, 2, 3):
                manager.save(step, {"layers": [{"w": jnp.arange(4.0) * step}]})
        w = eqx_ckpt.inspect.leaf_history("runs/a")["layers/0/w"]
        assert w.shape == (3, 4)
        assert w[:, 2].tolist() == [2.0, 4.0, 6.0]
        ```
    """
    run = Run(directory)
    if steps is None:
        there = chosen = run.at_least_one()
    else:
        there = run.readable_or_not() or run.at_least_one()
        chosen = _checked(steps)
    for step in chosen:
        if step not in there:
            raise run.missing(step)
    if not chosen:
        raise CheckpointNotFoundError("`steps` is empty: pass at least one step.")
    opened = at_once(lambda step: Checkpoint(run.location(step)), chosen)
    return LeafHistory(opened)


def _checked(steps: Any) -> list[int]:
    try:
        return [as_step(step) for step in steps]
    except (TypeError, ValueError) as e:
        raise type(e)(
            f"`steps` is {shown(steps)}. Pass a list of steps, or `None`."
        ) from e


def _type_of(record: LeafRecord | None) -> Any:
    """What is the same if values are of one array: not whose array it is."""
    if record is None:
        return None
    if record.value is not None:
        return record.kind
    return f"{record.dtype}{list(record.data_shape)}"


def _dtype_of(kind: str, numbers: Sequence[Any]) -> np.dtype:
    """The dtype that has Python numbers of a kind exactly."""
    bounds = np.iinfo(np.int64)
    if kind == "int":
        fits = bounds.min <= min(numbers) and max(numbers) <= bounds.max
        return np.dtype(np.int64 if fits else object)
    return np.asarray(numbers).dtype


def _number(record: LeafRecord) -> Any:
    return scalar_from_text(record.kind, record.value or "")


def _whole_key(key: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """An index with an integer or a slice for each axis."""
    keys = key if isinstance(key, tuple) else (key,)
    keys = tuple(k if isinstance(k, slice) or k is ... else _integer(k) for k in keys)
    if keys.count(...) > 1:
        raise IndexError("An index has at most one `...`.")
    if ... not in keys:
        keys = (*keys, ...)
    place = keys.index(...)
    more = len(shape) - len(keys) + 1
    if more < 0:
        raise IndexError(f"{len(keys) - 1} indices for an array of {len(shape)} axes.")
    return (*keys[:place], *[slice(None)] * more, *keys[place + 1 :])


def _integer(key: Any) -> int:
    try:
        return key.__index__()
    except (AttributeError, TypeError):
        raise IndexError(
            f"{key!r} is no index of a part that is read: pass integers, slices and "
            "`...`, and index the result."
        ) from None


def _region(key: int | slice, size: int) -> tuple[slice, int | slice]:
    """What is read along an axis, and what is taken of that."""
    if isinstance(key, int):
        place = range(size)[key]
        return slice(place, place + 1), 0
    chosen = range(size)[key]
    if not chosen:
        return slice(0, 0), slice(None)
    first, last = sorted((chosen[0], chosen[-1]))
    return slice(first, last + 1), slice(None, None, chosen.step)
