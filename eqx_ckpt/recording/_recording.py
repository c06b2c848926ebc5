"""Samples that survive the death of the process that draws them."""

import operator
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._distributed.meeting import DEADLINE
from .._errors import CheckpointError
from .._format.metadata import exactly
from .._format.recorded import Leaf, Record
from .._restore import tree_deserialise_leaves
from .._storage.recorded import Recorded
from .._tree.compression import check_compression, Compression
from .._types import PathLike
from ._leaves import checked_samples, leaves_of
from ._log import Log
from ._recorder import Receiver, Recorder
from ._samples import committed_of, open_samples, Samples


# Of samples that a compiled program hands over at a time.
_BLOCK_BYTES = 2**20
_MAX_BLOCK = 1024


class Recording:
    """Samples on a disk or in a store, to which a program adds; they survive its death.

    Each leaf of a sample has a Zarr array of its own, which grows. `commit` makes the
    samples so far durable, together with the state of the sampler that comes after
    them. A program that is killed goes on from the last commit, with the same samples
    as if it had not been. Its directory is `samples/`, which readers of Zarr take,
    `states/` with the last state as a checkpoint, and the record `recording.json`.

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
        with eqx_ckpt.Recording("chain", like) as recording:
            if recording.committed is not None:
                state = recording.resume(state)
            for _ in range(3):
                state, samples = block(state)
                recording.extend(samples)
                recording.commit(state)
        samples = eqx_ckpt.Recording.open("chain").read(start=100, thin=10)
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
        deadline: float = DEADLINE,
    ) -> None:
        """**Arguments:**

        - `path`: a directory or URL where nothing is yet, or that of a recording to go
            on with.
        - `like`: one sample of one chain: a PyTree of arrays, or of
            `jax.ShapeDtypeStruct`s. Typed PRNG keys and scalars of NumPy will do.
        - `chains`: how many chains there are. The arrays of samples then have a first
            axis for them; with `None`, they have none.
        - `max_samples`: how many samples of each chain to take at most; more are an
            error.
        - `metadata`: anything that JSON can hold.
        - `compression`: as [`eqx_ckpt.tree_serialise_leaves`][].
        - `chunk_bytes`: how large the files of an array are, about. The default is
            1 MiB, and less for many chains: each commit writes the last file of each
            leaf and chain again.
        - `deadline`: as [`eqx_ckpt.tree_serialise_leaves`][].

        **Raises:**

        - [`eqx_ckpt.CheckpointExistsError`][]: there is something else at `path`.
        - [`eqx_ckpt.CheckpointError`][]: another process writes to the recording, it
            was begun with another `like` or `chains`, or `like` cannot be recorded.
        - [`eqx_ckpt.CorruptCheckpointError`][]: the recording is damaged.
        - `OSError`: the disk is full, or may not be written to, or fails.
        """
        for argument, value in (
            ("chains", chains),
            ("max_samples", max_samples),
            ("chunk_bytes", chunk_bytes),
        ):
            if value is not None:
                check_positive(argument, value)
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
                return f"chunks of {old.rows} draws, and {new.rows} now"
            before, now = old.record.compression, new.record.compression
            if compression is not None and before != now:
                return f"compression {before!r}, and {now!r} now"
            return ""

        self.log = Log(path, wanted, differs, max_samples, deadline)
        names = [leaf.name for leaf in leaves]
        self._names = jtu.tree_structure(like).unflatten(names)
        self._receivers: list[Receiver] = []
        weakref.finalize(self, self.log.abandon)

    @staticmethod
    def open(path: PathLike) -> Samples:
        """Read a recording, whether it is being written or not.

        **Arguments:**

        - `path`: its directory or URL.

        **Returns:**

        The [`eqx_ckpt.Samples`][] that are committed, as nested dictionaries.

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no recording at `path`.
        - [`eqx_ckpt.CorruptCheckpointError`][]: its record is damaged.
        """
        return open_samples(path)

    @property
    def committed(self) -> int | np.ndarray | None:
        """How many draws are safe: of each chain, if these differ.

        `None` before the first commit.
        """
        return committed_of(self.log.record)

    @property
    def steps(self) -> int:
        """How many steps [`eqx_ckpt.record_scan`][] has taken up to the last commit."""
        return self.log.record.steps

    @property
    def chains(self) -> int | None:
        """As it was given."""
        return self.log.record.chains

    def extend(self, samples: PyTree, keep: Any = None) -> None:
        """Take samples, and write them in the background.

        Arrays of NumPy may be changed when this returns, and those of JAX be donated.
        At most 256 MiB of samples, or one block, wait to be written; this waits for
        room.

        **Arguments:**

        - `samples`: as `like`, with arrays `(chain, draw, ...)`, or `(draw, ...)` if
            there are no chains. Of arrays that are sharded over the chains, each shard
            is written as it is.
        - `keep`: which draws to take: `bool[draw]`, or `bool[chain, draw]`.

        **Raises:**

        - [`eqx_ckpt.LeafMismatchError`][]: the samples are not as `like`.
        - `ValueError`: `keep` is of another shape.
        - [`eqx_ckpt.CheckpointError`][]: it has `max_samples`, is closed, or was not
            resumed.
        - `OSError`: samples taken earlier could not be written.
        """
        record = self.log.record
        self.log.extend(checked_samples(samples, record.leaves, record.chains), keep)

    def append(self, sample: PyTree) -> None:
        """Take one sample: as `extend`, of arrays without an axis for draws."""
        record = self.log.record
        block = checked_samples(sample, record.leaves, record.chains, one=True)
        axis = 0 if record.chains is None else 1
        arrays = [_with_axis(array, axis) for array in block.arrays]
        self.log.extend(block._replace(arrays=arrays))

    def recorder(self, *, block: int | None = None) -> Recorder:
        """Make what saves samples from inside a compiled program.

        **Arguments:**

        - `block`: how many samples of each chain to hand over at a time. The default
            is about 1 MiB of them.

        **Returns:**

        An [`eqx_ckpt.Recorder`][], to carry through the loop.
        """
        self.log.check()
        if not self.log.team.is_alone:
            raise CheckpointError(
                "A recorder takes the samples of one process, and this job has "
                "several. Use `record_scan`, or `extend` with arrays that are sharded "
                "over the chains."
            )
        leaves = self.log.record.leaves
        if block is None:
            nbytes = sum(leaf.row_bytes for leaf in leaves) * (self.chains or 1)
            block = max(1, min(_MAX_BLOCK, _BLOCK_BYTES // max(1, nbytes)))
        check_positive("block", block)
        self._receivers.append(Receiver(self.log))
        self.log.has_recorder = True
        return Recorder(self._receivers[-1], leaves, self.chains, block)

    def commit(self, state: PyTree = None) -> None:
        """Make the samples so far durable, and the state that comes after them.

        When this returns, both survive a power cut. Until then, what was committed
        before is as it was. Older states are deleted.

        **Arguments:**

        - `state`: what `resume` is to give back: any PyTree that
            [`eqx_ckpt.tree_serialise_leaves`][] saves. `None`: the samples alone, after
            which no program can go on.

        **Raises:**

        - As `extend`, and as [`eqx_ckpt.tree_serialise_leaves`][] for `state`.
        """
        self.log.commit(state)

    @property
    def state_path(self) -> PathLike:
        """The path of the last committed state, an ordinary checkpoint.

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: no state was committed last.
        """
        return self.log.state_path()

    def resume(self, like_state: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        """The state that comes after the committed samples.

        **Arguments:**

        - `like_state`: as the `like` of [`eqx_ckpt.tree_deserialise_leaves`][].
        - The others: as of that function: `where`, `prefix`, `sharding`, ...

        **Raises:**

        - [`eqx_ckpt.CheckpointNotFoundError`][]: no state was committed last.
        - As [`eqx_ckpt.tree_deserialise_leaves`][].
        """
        state = tree_deserialise_leaves(self.state_path, like_state, *args, **kwargs)
        self.log.must_resume = False
        return state

    def read(
        self,
        *,
        where: Callable[[PyTree], Any] | None = None,
        start: int = 0,
        stop: int | None = None,
        thin: int = 1,
        chain: int | None = None,
    ) -> PyTree:
        """Committed samples, in the structure of `like`.

        **Arguments:**

        - All: as `read` of [`eqx_ckpt.Samples`][].
        """
        recorded = Recorded(self.log.base, self.log.record)
        samples = Samples(recorded, self._names)
        return samples.read(where=where, start=start, stop=stop, thin=thin, chain=chain)

    def close(self) -> None:
        """Commit, and let others write; twice is once.

        If states were committed, samples after the last of them are dropped, with a
        warning: nothing can go on after them.
        """
        self.log.close()

    def __enter__(self) -> "Recording":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.log.close(error)
        except Exception as e:
            if error is None:
                raise
            error.add_note(f"Besides, the recording failed: {e!r}")

    def __repr__(self) -> str:
        return f"Recording({self.log.where}, chains={self.chains})"


def _with_axis(array: Any, axis: int) -> Any:
    """With an axis of length 1."""
    shape = (*array.shape[:axis], 1, *array.shape[axis:])
    return array.reshape(shape)


def check_positive(argument: str, value: Any) -> int:
    """A positive integer, or an error that names the argument."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 1:
        raise ValueError(f"`{argument}` is {value!r}. Pass a positive integer.")
    return number
