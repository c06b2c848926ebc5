"""A recording in a notebook."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._errors import CheckpointNotFoundError
from .._format.display import escape, tree_html
from .._format.leaf_record import dtype_from_tag, from_stored
from .._format.manifest import MANIFEST
from .._format.sample_record import Leaf, RECORD, Record
from .._format.source import Source
from .._sources.recording_source import find_recorded, Recorded
from .._storage.locate import locate
from .._tree.matching.name_tree import nested
from .._tree.matching.where_argument import picked_by
from .._types import check_integer, PathLike
from ._sample_exports import to_datatree, to_hdf5, to_npz


def record_html(head: str, record: Record) -> str:
    """What is committed: a tree of the leaves, with the bytes of all their samples."""
    draws = ", ".join(map(str, record.draws[:8])) + ", ..." * (len(record.draws) > 8)
    leaves = {
        leaf.name: (str(leaf.record), leaf.row_bytes * sum(record.draws))
        for leaf in record.leaves
    }
    metadata = "" if record.metadata is None else escape(repr(record.metadata))
    about = f"<p>{draws} draws in {record.commit} commits</p>"
    return tree_html(head, leaves) + about + (f"<p>{metadata}</p>" if metadata else "")


class Samples:
    """The committed samples of a recording.

    They are those of the last commit before this was made. A writer may continue
    meanwhile: it only adds samples, and never changes these.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp
        import numpy as np

        with eqx_ckpt.recording.Recording("chain", {"theta": np.zeros(3)}) as recording:
            recording.extend({"theta": np.ones((100, 3))})
        samples = eqx_ckpt.recording.Samples("chain")
        assert samples.committed == 100
        assert samples.read(start=50, thin=10)["theta"].shape == (5, 3)
        ```
    """

    def __init__(self, path: PathLike) -> None:
        """**Arguments:**

        - `path`: the directory or URL of the recording. The samples are then nested
            dictionaries; `samples` of a [`eqx_ckpt.recording.Recording`][] has them in
            the structure of its `like`.

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no recording at `path`.
        - [`eqx_ckpt.CorruptCheckpointError`][]: its record is damaged.
        """
        recorded = _found_at(path)
        self._open(recorded, nested(recorded.manifest, "", lambda name, _: name))

    def _open(self, recorded: Recorded, names: PyTree[str]) -> None:
        self._recorded = recorded
        self._record = recorded.record
        self._leaves = {leaf.name: leaf for leaf in recorded.record.leaves}
        self._names = names

    @property
    def path(self) -> str:
        """The path of the recording, for messages."""
        return str(self._recorded)

    @property
    def chains(self) -> int | None:
        """As it was given to the [`eqx_ckpt.recording.Recording`][]."""
        return self._record.chains

    @property
    def metadata(self) -> Any:
        """As it was given to the [`eqx_ckpt.recording.Recording`][]."""
        return self._record.metadata

    @property
    def committed(self) -> int | np.ndarray | None:
        """The number of draws; an array, one per chain, if these differ."""
        return committed_of(self._record)

    @property
    def like(self) -> PyTree[jax.ShapeDtypeStruct]:
        """One sample of one chain, as `jax.ShapeDtypeStruct`s."""
        return jtu.tree_map(lambda name: _struct(self._leaves[name]), self._names)

    def read(
        self,
        *,
        where: Callable[[PyTree], Any] | None = None,
        start: int = 0,
        stop: int | None = None,
        thin: int = 1,
        chain: int | None = None,
    ) -> PyTree:
        """Read samples into host memory, and verify their checksums.

        **Arguments:**

        - `where`: which leaves to read: a function of the tree, as in
            `equinox.tree_at`, such as `where=lambda t: t["theta"]`, or a tuple of
            nodes.
        - `start`, `stop`: which draws. The default is all of them. If some chains have
            more draws than others, pass a `stop` that all chains have, or a `chain`.
        - `thin`: read every `thin`-th draw, beginning with `start`.
        - `chain`: read only this chain; the arrays then have no axis for chains.

        **Returns:**

        What `where` picks, or the whole tree, as NumPy arrays `(chain, draw, ...)` or
        `(draw, ...)`. Typed PRNG keys are JAX arrays.

        **Raises:**

        - `ValueError`: the recording has no such draws or chain.
        - [`eqx_ckpt.LeafMismatchError`][]: `where` does not pick a part of the tree.
        - [`eqx_ckpt.CorruptCheckpointError`][]: a file is damaged or missing.
        """
        chains = self._chains(chain)
        draws = self._draws(chains, start, stop, thin)
        picked = self._names
        if where is not None:
            names = jtu.tree_leaves(self._names)
            positions = picked_by(where, self._names, None)
            picked = jtu.tree_map(lambda position: names[position], positions)

        def read(name: str) -> Any:
            leaf = self._leaves[name]
            found = _finished(self._recorded.samples(leaf, chains, draws), leaf)
            return found if chain is None or self.chains is None else found[0]

        return jtu.tree_map(read, picked)

    @property
    def source(self) -> Source:
        """A [`eqx_ckpt.interop.Source`][] of these samples, to pass in place of a path.

        The source has one array `(chain, draw, ...)` or `(draw, ...)` per leaf, with
        the draws that all chains have.
        """
        return self._recorded

    def to_npz(self, directory: PathLike, *, overwrite: bool = False) -> list[Path]:
        """Write `chain_0.npz`, `chain_1.npz`, ..., which `numpy.load` opens.

        Each file contains an array `(draw, ...)` for each leaf, under the leaf's name;
        PRNG keys are stored as their key data. At most 32 MiB are in memory at a time.

        **Arguments:**

        - `directory`: the directory to write to.
        - `overwrite`: whether to replace existing npz files.

        **Returns:**

        The paths of the files.

        **Raises:**

        - [`eqx_ckpt.CheckpointError`][]: NumPy cannot store the dtype of a leaf, such
            as `bfloat16`; nothing is written.
        - [`eqx_ckpt.CheckpointExistsError`][]: a file exists already.
        - [`eqx_ckpt.CorruptCheckpointError`][]: samples are damaged; nothing is
            written.
        """
        return to_npz(self._recorded, directory, overwrite)

    def to_hdf5(self, path: PathLike, *, overwrite: bool = False) -> Path:
        """Write an HDF5 file; needs h5py.

        The file contains a dataset `(chain, draw, ...)` or `(draw, ...)` for each leaf,
        under the leaf's name, where each `/` opens a group; PRNG keys are stored as
        their key data. The attribute `metadata` is the metadata of the recording, as
        JSON. At most 32 MiB are in memory at a time.

        **Arguments:**

        - `path`: the file to write.
        - `overwrite`: whether to replace an existing HDF5 file.

        **Returns:**

        The path of the file.

        **Raises:**

        - `ImportError`: h5py is not installed.
        - `ValueError`: some chains have more draws than others.
        - The errors of `to_npz`.
        """
        return to_hdf5(self._recorded, path, overwrite)

    def to_datatree(self) -> Any:
        """The samples as an `xarray.DataTree`, for ArviZ and others; needs xarray.

        Its arrays have dimensions such as `("chain", "draw", "theta_dim_0")`. They are
        read, and their checksums verified, when they are used.

        **Raises:**

        - `ImportError`: xarray is not installed.
        - `ValueError`: some chains have more draws than others.
        - [`eqx_ckpt.CheckpointError`][]: a leaf, or a group of leaves, has the name
            `draw`, or in a recording with chains the name `chain`; or a leaf and one
            in a group below it have the same name and different shapes.
        """
        return to_datatree(self._recorded)

    def verify(self) -> None:
        """Read all samples, and verify their checksums.

        **Raises:**

        - [`eqx_ckpt.CorruptCheckpointError`][]: samples are damaged; names every
            damaged leaf.
        """
        self._recorded.verify()

    def _chains(self, chain: int | None) -> range:
        count = len(self._record.draws)
        if chain is None:
            return range(count)
        number = check_integer("chain", chain)
        if self.chains is None or not 0 <= number < count:
            raise ValueError(
                f"`chain` is {chain}, and the recording has "
                f"{'no chains' if self.chains is None else f'{count} chains'}."
            )
        return range(number, number + 1)

    def _draws(self, chains: range, start: int, stop: int | None, thin: int) -> range:
        counts = {self._record.draws[chain] for chain in chains}
        if stop is None and len(counts) > 1:
            raise ValueError(
                f"The chains have {min(counts)} to {max(counts)} draws, so they do "
                f"not form one array. Pass `stop={min(counts)}` or less, or read one "
                "`chain`."
            )
        start, thin = check_integer("start", start), check_integer("thin", thin, 1)
        last = min(counts) if stop is None else check_integer("stop", stop)
        if not 0 <= start <= last <= min(counts):
            raise ValueError(
                f"`start` is {start} and `stop` is {stop}, and the recording has "
                f"{min(counts)} draws."
            )
        return range(start, last, thin)

    def __repr__(self) -> str:
        return f"<{self.committed} samples of {self.path}, chains={self.chains}>"

    def _repr_html_(self) -> str:
        return record_html(repr(self), self._record)


def samples_of(recorded: Recorded, names: PyTree[str]) -> Samples:
    """The samples of a record; `names` has the name of each leaf in its place."""
    samples = Samples.__new__(Samples)
    samples._open(recorded, names)  # pyright: ignore[reportPrivateUsage]
    return samples


def _found_at(path: PathLike) -> Recorded:
    base = locate(path)
    recorded = find_recorded(base)
    if recorded is None:
        is_checkpoint = base.read(MANIFEST) is not None
        raise CheckpointNotFoundError(
            f"No recording at {base}: there is no `{RECORD}`."
            + " It holds a checkpoint, or a Zarr group." * is_checkpoint
        )
    return recorded


def committed_of(record: Record) -> int | np.ndarray | None:
    if not record.is_committed:
        return None
    if len(set(record.draws)) == 1:
        return record.draws[0]
    return np.array(record.draws)


def _finished(stored: np.ndarray, leaf: Leaf) -> Any:
    """Convert samples to the form that users get."""
    if leaf.record.kind == "key":
        return jax.random.wrap_key_data(jnp.asarray(stored), impl=leaf.record.impl)
    return from_stored(stored, leaf.record)


def _struct(leaf: Leaf) -> jax.ShapeDtypeStruct:
    record = leaf.record
    if record.kind == "key":
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=record.impl)).dtype
    else:
        dtype = dtype_from_tag(record.dtype)
    return jax.ShapeDtypeStruct(record.shape, dtype)
