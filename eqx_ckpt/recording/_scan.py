"""Record the samples of a scan, one compiled block of steps at a time."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .._types import is_real
from ._leaves import checked_samples
from ._recording import check_positive, Recording


# The default size of a block: large enough that recording hardly slows a step.
_BLOCK_BYTES = 2**20
_MAX_BLOCK = 1024


def record_scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    recording: Recording,
    state: PyTree,
    length: int,
    *,
    xs: PyTree = None,
    thin: int = 1,
    keep: Callable[[Any, Any], Any] | None = None,
    block: int | None = None,
    commit_every: int = 0,
    commit_every_seconds: float | None = None,
) -> PyTree:
    """Scan over a step, record its samples, and commit them with the last state.

    Like `jax.lax.scan`, but the samples go to a recording, one block at a time, while
    the device computes the next block. Call it outside `jax.jit`: it compiles blocks of
    steps itself. Inside `jax.jit`, use `recording.recorder()`.

    **Arguments:**

    - `step`: `step(state, x) -> state, sample`. If the recording has chains, the leaves
        of `sample` have a first axis for them.
    - `recording`: an [`eqx_ckpt.Recording`][].
    - `state`: the state to start from: that of `recording.resume`, if a state was
        committed.
    - `length`: the number of steps to take now. `recording.steps` is the number of
        steps up to the last commit.
    - `xs`: as in `jax.lax.scan`. With `None`, `x` is `None`.
    - `thin`: record one sample, the last one, of every `thin` steps. It must divide
        `length`.
    - `keep`: a function `keep(state, sample)` that returns whether to record the
        sample, as a bool, or as one bool per chain. `state` is the state after the
        step.
    - `block`: the number of samples to send to the host at a time.
    - `commit_every`: commit the samples and the state when at least this many steps
        have been taken since the last commit, at the end of a block.
    - `commit_every_seconds`: commit when this many seconds have passed since the last
        commit, at the end of a block.

    **Returns:**

    The last state, which has been committed.

    **Raises:**

    - [`eqx_ckpt.LeafMismatchError`][]: the samples do not match the `like` of the
        recording; nothing was computed.
    - `ValueError`: an argument is invalid, for example `thin` does not divide `length`.
    - The errors of `extend` and `commit` of [`eqx_ckpt.Recording`][].

    !!! example

        ```python
        import eqx_ckpt
        import jax
        import jax.numpy as jnp

        def step(state, _):
            key, theta = state
            key, subkey = jax.random.split(key)
            theta = 0.9 * theta + jax.random.normal(subkey, theta.shape)
            return (key, theta), {"theta": theta}

        state = (jax.random.key(0), jnp.zeros(3))
        with eqx_ckpt.Recording("chain", {"theta": jnp.zeros(3)}) as recording:
            state = eqx_ckpt.record_scan(step, recording, state, 10_000, thin=10)
        assert eqx_ckpt.Recording.open("chain").committed == 1000
        ```
    """
    rows = _checked_length(length, thin)
    if block is not None and check_positive("block", block) > rows > 0:
        raise ValueError(
            f"`block` is {block}. Pass at most {rows}: `length / thin` samples."
        )
    _check_commits(commit_every, commit_every_seconds)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((state, xs))):
        raise ValueError(
            "`record_scan` was called inside `jax.jit`, or another transformation. "
            "Call it outside; inside, use `recording.recorder()`."
        )
    for x in jax.tree.leaves(xs):
        if np.shape(x)[:1] != (length,):
            raise ValueError(
                f"`xs` has a leaf of shape {np.shape(x)}; its first axis is not "
                f"`length`, {length}."
            )
    arrays, rest = eqx.partition(state, eqx.is_array_like)
    arrays = jax.tree.map(jnp.asarray, arrays)
    _check_samples(step, recording, eqx.combine(arrays, rest), xs)
    if block is None:
        block = min(_MAX_BLOCK, max(1, _BLOCK_BYTES // max(1, _row_bytes(recording))))
    due = _Due(recording, commit_every, commit_every_seconds)
    loop = _Loop(step, keep, thin, recording.chains is not None)
    waiting: tuple[Any, Any] | None = None
    for start in range(0, rows, block):
        count = min(block, rows - start)
        some = jax.tree.map(
            lambda x, a=start * thin, n=count: x[a : a + n * thin].reshape(
                n, thin, *x.shape[1:]
            ),
            xs,
        )
        arrays, *made = _block(loop, arrays, rest, some, count)
        # Record the previous block while the device computes this one.
        if waiting is not None:
            recording.extend(*waiting)
        waiting = (made[0], made[1])
        if due(count * thin):
            recording.extend(*waiting)
            waiting = None
            recording.log.commit(eqx.combine(arrays, rest), due.reset())
    if waiting is not None:
        recording.extend(*waiting)
    state = eqx.combine(arrays, rest)
    if due.steps:
        recording.log.commit(state, due.reset())
    return state


def _row_bytes(recording: Recording) -> int:
    """The bytes of one sample of all chains."""
    rows = sum(leaf.row_bytes for leaf in recording.log.record.leaves)
    return rows * (recording.chains or 1)


class _Due:
    """Decides when to commit.

    **Attributes:**

    - `steps`: the steps since the last commit.
    """

    def __init__(self, recording: Recording, every: int, seconds: float | None) -> None:
        self._team = recording.log.team
        self._every = every
        self._seconds = seconds
        self._last = time.monotonic()
        self.steps = 0

    def __call__(self, steps: int) -> bool:
        self.steps += steps
        by_steps = bool(self._every) and self.steps >= self._every
        seconds = self._seconds
        if by_steps or seconds is None:
            return by_steps
        # The first process decides, because clocks differ.
        waited = time.monotonic() - self._last
        return self._team.from_first("time", lambda: waited >= seconds)

    def reset(self) -> int:
        steps, self.steps = self.steps, 0
        self._last = time.monotonic()
        return steps


def _checked_length(length: int, thin: int) -> int:
    """Validate `length` and `thin`; return the number of samples."""
    check_positive("thin", thin)
    if length != 0:
        check_positive("length", length)
    if length % thin:
        raise ValueError(
            f"`length` is {length} and `thin` is {thin}. Pass a `length` that `thin` "
            "divides."
        )
    return length // thin


def _check_commits(steps: Any, seconds: Any) -> None:
    """Validate `commit_every` and `commit_every_seconds`."""
    if steps != 0:
        check_positive("commit_every", steps)
    if seconds is not None and not (is_real(seconds) and seconds >= 0):
        raise ValueError(
            f"`commit_every_seconds` is {seconds!r}. Pass 0 or more seconds, or `None`."
        )


def _check_samples(step: Any, recording: Recording, state: Any, xs: Any) -> None:
    x = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        jax.eval_shape(lambda xs: xs, xs),
    )
    sample = eqx.filter_eval_shape(step, state, x)[1]
    leaves = recording.log.record.leaves
    checked_samples(sample, leaves, recording.chains, one=True, traced=True)


class _Loop(NamedTuple):
    """What `record_scan` repeats; static for `eqx.filter_jit`."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    keep: Callable[[Any, Any], Any] | None
    thin: int
    has_chains: bool


@eqx.filter_jit
def _block(
    loop: _Loop, arrays: PyTree, rest: PyTree, xs: PyTree, rows: int
) -> tuple[PyTree, PyTree, Any]:
    """Compute `rows` samples: the state after them, the samples, and which to keep."""

    def once(arrays: Any, x: Any) -> tuple[Any, Any]:
        state, sample = loop.step(eqx.combine(arrays, rest), x)
        return eqx.filter(state, eqx.is_array_like), (state, sample)

    def row(arrays: Any, xs: Any) -> tuple[Any, Any]:
        if loop.thin > 1:
            first = jax.tree.map(lambda x: x[:-1], xs)
            arrays, _ = jax.lax.scan(
                lambda a, x: (once(a, x)[0], None), arrays, first, length=loop.thin - 1
            )
        last = jax.tree.map(lambda x: x[-1], xs)
        arrays, (state, sample) = once(arrays, last)
        chosen = None if loop.keep is None else loop.keep(state, sample)
        return arrays, (sample, chosen)

    arrays, (samples, kept) = jax.lax.scan(row, arrays, xs, length=rows)
    if loop.has_chains:
        samples = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), samples)
        kept = jax.tree.map(lambda x: x if x.ndim == 1 else x.T, kept)
    return arrays, samples, kept
