"""A recording: samples that survive the process that draws them."""

import weakref
from types import TracebackType
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._distributed.meeting import TIMEOUT
from .._errors import besides, CheckpointError
from .._format.sample_record import Leaf, Record
from .._format.user_metadata import exactly
from .._inspecting.inspect_checkpoint import read_manifest
from .._restoring.restore import tree_deserialise_leaves
from .._sources.recording_source import Recorded
from .._tree.leaves.transient import is_transient
from .._tree.plans.write_plan import check_compression, Compression
from .._types import check_optional_integer, PathLike
from ._recorder import make_recorder, Recorder
from ._samples import committed_of, record_html, Samples, samples_of
from ._writing._recording_log import Log
from ._writing._sample_leaves import checked_samples, leaves_of
from ._writing._sample_receiver import Receiver


class Recording:
    """Append samples to a disk or a store while a program draws them.

    Each leaf of a sample has its own Zarr array, which grows. `commit` makes the
    samples so far durable, together with the state of the sampler. A program that is
    killed resumes from the last commit, and draws the same samples as without the
    interruption. The directory of a recording contains `samples/`, which any Zarr
    reader opens; `states/`, with the last state as a checkpoint; and the record,
    `recording.json`.

    !!! example

        ```python
        import eqx_ckpt
        import jax
        import jax.numpy as jnp

        @jax.jit
        def block(state):
            def step(theta, key):
                theta = 0.9 * theta + jax.random.normal(key, theta.shape)
                return theta, {"theta": theta}

            key, theta = state
            key, subkey = jax.random.split(key)
            theta, samples = jax.lax.scan(step, theta, jax.random.split(subkey, 100))
            return (key, theta), samples

        like = {"theta": jax.ShapeDtypeStruct((5,), jnp.float32)}
        state = (jax.random.key(0), jnp.zeros(5))
        with eqx_ckpt.recording.Recording("chain", like) as recording:
            if recording.committed is not None:
                state = recording.resume(state)
            for _ in range(3):
                state, samples = block(state)
                recording.extend(samples)
                recording.commit(state)
        samples = eqx_ckpt.recording.Samples("chain").read(start=100, thin=10)
        assert samples["theta"].shape == (20, 5)
        ```
    """

    def __init__(
        self,
        path: PathLike,
        like: PyTree,
        *,
        chains: int | None = None,
        max_samples: int | None = None,
        metadata: Any = None,
        compression: Compression = None,
        chunk_bytes: int | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        """**Arguments:**

        - `path`: the directory or URL of a new recording, or of one to continue.
        - `like`: one sample of one chain: a PyTree of arrays, or of
            `jax.ShapeDtypeStruct`s. Typed PRNG keys and NumPy scalars are allowed.
        - `chains`: the number of chains, which is then the first axis of the arrays of
            samples. With `None`, the arrays have no such axis.
        - `max_samples`: the most samples that each chain may have. Recording more
            raises an error.
        - `metadata`: any value that JSON can represent.
        - `compression`: as [`eqx_ckpt.tree_serialise_leaves`][].
        - `chunk_bytes`: the approximate size of each file of an array. By default, the
            last files of all chains and leaves have about 1 MiB together, because each
            commit rewrites them; those of one leaf at least 128 KiB. If there are more
            than 16 chains, several of them are in one file.
        - `timeout`: as [`eqx_ckpt.tree_serialise_leaves`][].

        **Raises:**

        - [`eqx_ckpt.CheckpointExistsError`][]: `path` holds something else.
        - [`eqx_ckpt.CheckpointError`][]: another process is writing to the recording,
            the recording was begun with a different `like` or `chains`, or `like`
            cannot be recorded.
        - [`eqx_ckpt.CorruptCheckpointError`][]: the recording is damaged.
        - `OSError`: the disk is full, not writable, or failing.
        """
        chains = check_optional_integer("chains", chains, 1)
        max_samples = check_optional_integer("max_samples", max_samples, 1)
        chunk_bytes = check_optional_integer("chunk_bytes", chunk_bytes, 1)
        check_compression(compression)
        leaves = leaves_of(like, chains, compression, chunk_bytes)
        wanted = Record(
            leaves=tuple(leaves),
            chains=chains,
            metadata=None if metadata is None else exactly(metadata),
            draws=(0,) * (chains or 1),
        )

        def differs(old: Leaf, new: Leaf) -> str:
            if chunk_bytes is not None and old.rows != new.rows:
                return f"chunks of {old.rows} draws in the recording, {new.rows} now"
            before, now = old.record.compression, new.record.compression
            if compression is not None and before != now:
                return f"compression {before!r} in the recording, {now!r} now"
            return ""

        names = [leaf.name for leaf in leaves]
        self._names = jtu.tree_structure(like).unflatten(names)
        self._receivers: list[Receiver] = []
        log = None
        try:
            self._log = log = Log(path, wanted, differs, max_samples, timeout)
            weakref.finalize(self, log.abandon)
        except BaseException:
            if log is not None:
                log.abandon()
            raise

    @property
    def committed(self) -> int | np.ndarray | None:
        """The number of committed draws; an array, one per chain, if these differ.

        `None` before the first commit.
        """
        return committed_of(self._log.record)

    @property
    def steps(self) -> int:
        """How many steps of `record_scan` are committed."""
        return self._log.record.steps

    @property
    def chains(self) -> int | None:
        """The number of chains, or `None`."""
        return self._log.record.chains

    def extend(self, samples: PyTree, keep: Any = None) -> None:
        """Add samples; they are written in the background.

        When this returns, you may change NumPy arrays and donate JAX arrays. If more
        than 256 MiB of samples wait to be written, this waits first.

        **Arguments:**

        - `samples`: a PyTree like `like`, with an axis for draws in front of each
            array, and before it one for chains, if there are chains. Arrays that are
            sharded over the chains are not gathered.
        - `keep`: which draws to record: `bool[draw]`, or `bool[chain, draw]`.

        **Raises:**

        - [`eqx_ckpt.LeafMismatchError`][]: the samples do not match `like`.
        - `ValueError`: `keep` has a different shape or dtype.
        - [`eqx_ckpt.CheckpointError`][]: the recording has `max_samples` already, is
            closed, or has a state and was not resumed.
        - `OSError`: earlier samples could not be written.
        """
        record = self._log.record
        self._log.extend(checked_samples(samples, record.leaves, record.chains), keep)

    def append(self, sample: PyTree) -> None:
        """Add one sample: as `extend`, with arrays without an axis for draws."""
        record = self._log.record
        block = checked_samples(sample, record.leaves, record.chains, one=True)
        axis = 0 if record.chains is None else 1
        arrays = [_with_axis(array, axis) for array in block.arrays]
        self._log.extend(block._replace(arrays=arrays))

    def recorder(
        self, *, block: int | None = None, sharding: NamedSharding | None = None
    ) -> Recorder:
        """Create a recorder, which records samples inside a compiled program.

        **Arguments:**

        - `block`: the number of samples of each chain to send at a time. The default is
            about 2 MiB of samples.
        - `sharding`: how the first axis of its arrays, that of the chains, is sharded.
            Each device then sends the samples of its own chains.

        **Returns:**

        An [`eqx_ckpt.recording.Recorder`][] to carry through the loop.
        """
        self._log.check()
        if not self._log.team.is_alone:
            raise CheckpointError(
                "A recorder works in jobs of one process, and this job has several. "
                "Use `record_scan`, or `extend` with arrays that are sharded "
                "over the chains."
            )
        receiver, recorder = make_recorder(
            self._log, self._log.record.leaves, self.chains, block, sharding
        )
        self._receivers.append(receiver)
        self._log.has_recorder = True
        return recorder

    def commit(self, state: PyTree = None) -> None:
        """Make the samples so far durable, together with the state that follows them.

        When this returns, both survive a power cut. If it fails, the previous commit
        remains. Older states are deleted.

        **Arguments:**

        - `state`: what `resume` will return: any PyTree that
            [`eqx_ckpt.tree_serialise_leaves`][] can save. With `None`, only the samples
            are committed, and no program can resume from them.

        Samples that a recorder still has on the device cannot be committed: call its
        `flush` first.

        **Raises:**

        - The errors of `extend`, and those of [`eqx_ckpt.tree_serialise_leaves`][] for
            `state`.
        """
        self._log.commit(state)

    @property
    def state_path(self) -> PathLike:
        """The path of the last committed state, an ordinary checkpoint.

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: no state was committed last.
        """
        return self._log.state_path()

    def resume(self, like_state: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        """Restore the state that follows the committed samples.

        **Arguments:**

        - `like_state`: like the `like` of [`eqx_ckpt.tree_deserialise_leaves`][]. If
            only JAX arrays were committed, as by [`eqx_ckpt.recording.record_scan`][],
            Python numbers stand for the arrays that `jax.lax.scan` makes of them.
        - All others: as that function (`where`, `prefix`, `sharding`, ...).

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: no state was committed last.
        - [`eqx_ckpt.CheckpointError`][]: samples were recorded after the last commit.
        - As [`eqx_ckpt.tree_deserialise_leaves`][].
        """
        path = self.state_path
        self._log.check_resumed()
        kinds = {leaf.kind for leaf in read_manifest(path).leaves.values()}
        if kinds <= {"jax", "key"}:
            like_state = jtu.tree_map(_as_carried, like_state, is_leaf=is_transient)
        state = tree_deserialise_leaves(path, like_state, *args, **kwargs)
        self._log.must_resume = False
        return state

    @property
    def samples(self) -> Samples:
        """The committed samples, in the structure of `like`."""
        return samples_of(Recorded(self._log.base, self._log.record), self._names)

    def close(self) -> None:
        """Commit, and release the recording for other writers.

        If a state was committed, samples after the last state are dropped with a
        warning, because no program could resume after them; with an error if the last
        `commit` had failed. Closing twice is harmless.
        """
        self._log.close()

    def __enter__(self) -> "Recording":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            with besides(error, "the recording"):
                self._log.close(error)
        finally:
            self._log.abandon()

    def __repr__(self) -> str:
        return f"Recording({self._log.where}, chains={self.chains})"

    def _repr_html_(self) -> str:
        return record_html(repr(self), self._log.record)


def log_of(recording: Recording) -> Log:
    return recording._log  # pyright: ignore[reportPrivateUsage]


def _as_carried(leaf: Any) -> Any:
    """Convert a number, or an array of NumPy that JAX narrows, as a scan does."""
    is_host = isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic)
    if not is_host or np.asarray(leaf).dtype.kind not in "biufc":
        return leaf
    carried = jnp.asarray(leaf)
    return leaf if getattr(leaf, "dtype", None) == carried.dtype else carried


def _with_axis(array: Any, axis: int) -> Any:
    """Add an axis of length 1."""
    shape = (*array.shape[:axis], 1, *array.shape[axis:])
    return array.reshape(shape)
