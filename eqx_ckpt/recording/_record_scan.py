"""Record the samples of a scan, one compiled block of steps at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .._format.sample_record import Leaf
from .._types import (
    check_function,
    check_integer,
    check_kind,
    check_optional_integer,
    is_real,
    shown,
)
from ._recorder import default_block
from ._recording import log_of, Recording
from ._writing._commit_pace import Every, Pace
from ._writing._recording_log import Log
from ._writing._sample_leaves import (
    Block,
    check_on_device,
    checked_keep,
    checked_samples,
    on_host,
)


def record_scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    *,
    recording: Recording,
    thin: int = 1,
    keep: Callable[[Any, Any], Any] | None = None,
    block: int | None = None,
    commit_every: int = 0,
    commit_every_seconds: float | None = None,
) -> PyTree:
    """Scan over a step, record its samples, and commit them with the last state.

    As `jax.lax.scan`, but the samples go to a recording, one block at a time, while
    the device computes the next block. Call it outside `jax.jit`: it compiles blocks of
    steps itself. Inside `jax.jit`, use `recording.recorder()`.

    **Arguments:**

    - `f`: a step: `f(state, x) -> state, sample`. Of the state, only arrays and numbers
        can change. If the recording has chains, the leaves of `sample` have a first
        axis for them.
    - `init`: the state to start from: that of `recording.resume`, if a state was
        committed.
    - `xs`: as in `jax.lax.scan`. With `None`, `x` is `None`.
    - `length`: the number of steps to take now. `recording.steps` is the number of
        steps up to the last commit. The default is the length of `xs`.
    - `recording`: an [`eqx_ckpt.recording.Recording`][].
    - `thin`: record one sample, the last one, of every `thin` steps. It must divide
        `length`.
    - `keep`: a function `keep(state, sample)` that returns whether to record the
        sample, as a bool, or as one bool per chain. `state` is the state after the
        step.
    - `block`: the most samples to send to the host at a time. There are fewer if the
        next arguments need it.
    - `commit_every`: commit the samples and the state at least once in this many steps,
        or in `thin` steps if that is more. 0: only at the end.
    - `commit_every_seconds`: commit about once in this many seconds, measured by the
        time that the steps take, or in two or three samples if that is more; 0: after
        each sample.

    **Returns:**

    The last state, which has been committed.

    **Raises:**

    - [`eqx_ckpt.LeafMismatchError`][]: the samples do not match the `like` of the
        recording; nothing was computed.
    - [`eqx_ckpt.CheckpointError`][]: JAX would change a dtype of that `like`, such as
        NumPy's `float64` without x64; nothing was computed.
    - `TypeError` or `ValueError`: an argument is invalid, for example `thin` does not
        divide `length`.
    - The errors of `extend` and `commit` of [`eqx_ckpt.recording.Recording`][].

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
        like = {"theta": jnp.zeros(3)}
        with eqx_ckpt.recording.Recording("chain", like) as recording:
            state = eqx_ckpt.recording.record_scan(
                step, state, length=10_000, recording=recording, thin=10
            )
        assert eqx_ckpt.recording.Samples("chain").committed == 1000
        ```
    """
    check_function("f", f)
    if keep is not None:
        check_function("keep", keep)
    check_kind("recording", recording, Recording, "an `eqx_ckpt.recording.Recording`")
    length = _length_of(xs) if length is None else check_integer("length", length, 0)
    thin = check_integer("thin", thin, 1)
    if length % thin:
        raise ValueError(
            f"`length` is {length} and `thin` is {thin}. Pass a `length` that `thin` "
            "divides."
        )
    rows = length // thin
    block = check_optional_integer("block", block, 1)
    every = _checked_commits(commit_every, commit_every_seconds)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((init, xs))):
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
    arrays, rest = eqx.partition(init, eqx.is_array_like)
    arrays = jax.tree.map(jnp.asarray, arrays)
    log = log_of(recording)
    check_on_device(log.record.leaves)
    loop = _Loop(f, keep, thin, recording.chains, log.record.leaves)
    _check_step(loop, eqx.combine(arrays, rest), xs)
    log.check()
    if block is None:
        block = default_block(loop.leaves, loop.chains)
    log.team.from_first(
        f"record_scan(length={length}, thin={thin}, keep={keep is not None}, "
        f"block={block}, commit_every={every.steps}, "
        f"commit_every_seconds={every.seconds})",
        lambda: None,
    )
    pace = Pace(log.team, min(block, max(1, rows)), thin, every)
    return _Scan(loop, log, pace, rest, xs).run(arrays, rows)


class _Made(NamedTuple):
    """A block of samples that was computed, or is being computed."""

    before: PyTree
    start: int
    samples: list[Any]
    kept: Any
    rows: int


class _Scan:
    """One call of `record_scan`, whose arguments are valid."""

    def __init__(
        self, loop: "_Loop", log: Log, pace: Pace, rest: PyTree, xs: PyTree
    ) -> None:
        self._loop = loop
        self._log = log
        self._pace = pace
        self._rest = rest
        self._xs = xs
        # The steps up to the last commit, and whether samples were recorded since then.
        self._steps = 0
        self._has_rest = False

    def run(self, arrays: PyTree, rows: int) -> PyTree:
        try:
            return self._run(arrays, rows)
        except BaseException:
            self._log.scan_failed(self._has_rest, bool(self._steps))
            raise

    def _run(self, arrays: PyTree, rows: int) -> PyTree:
        pace = self._pace
        waiting: _Made | None = None
        done = 0
        while done < rows:
            count = pace.next(rows - done)
            after, made = self._compute(arrays, done, count)
            # Record the previous block while the device computes this one.
            if waiting is not None:
                self._record(waiting)
                pace.finished(waiting.rows)
            waiting, arrays, done = made, after, done + count
            if pace.is_measuring:
                jax.block_until_ready(arrays)
                pace.finished(count)
            if pace.is_due(count):
                self._record(waiting)
                waiting = None
                self._commit(arrays)
        if waiting is not None:
            self._record(waiting)
        if pace.steps:
            self._commit(arrays)
        return eqx.combine(arrays, self._rest)

    def _compute(self, arrays: PyTree, start: int, rows: int) -> tuple[PyTree, _Made]:
        thin = self._loop.thin
        some = jax.tree.map(
            lambda x: x[start * thin : (start + rows) * thin].reshape(
                rows, thin, *x.shape[1:]
            ),
            self._xs,
        )
        after, samples, kept = _block(self._loop, arrays, self._rest, some, rows)
        return after, _Made(arrays, start, samples, kept, rows)

    def _record(self, made: _Made) -> None:
        """Record a block; if `max_samples` ends it, commit the state at that point."""
        kept = on_host(made.kept)
        fits = self._log.fitting(kept, made.rows)
        if fits == made.rows:
            self._extend(Block(made.samples, made.rows), kept)
            return
        arrays = made.before
        if fits:
            arrays, made = self._compute(arrays, made.start, fits)
            self._extend(Block(made.samples, fits), made.kept)
        self._pace.steps = (made.start + fits) * self._loop.thin - self._steps
        if self._pace.steps:
            self._commit(arrays)
        raise self._log.full()

    def _extend(self, block: Block, kept: Any) -> None:
        self._has_rest = True
        self._log.extend(block, kept)

    def _commit(self, arrays: PyTree) -> None:
        steps = self._pace.committed()
        self._steps += steps
        self._log.commit(eqx.combine(arrays, self._rest), steps)
        self._has_rest = False


def _length_of(xs: PyTree) -> int:
    shapes = [np.shape(x) for x in jax.tree.leaves(xs)]
    if not shapes or not shapes[0]:
        raise TypeError(
            "`length` is missing, and `xs` has no leaf with a first axis. Pass the "
            "number of steps as `length`."
        )
    return shapes[0][0]


def _checked_commits(steps: Any, seconds: Any) -> Every:
    """Validate `commit_every` and `commit_every_seconds`."""
    steps = check_integer("commit_every", steps, 0)
    if seconds is not None and not (is_real(seconds) and seconds >= 0):
        raise ValueError(
            f"`commit_every_seconds` is {shown(seconds)}. Pass 0 or more seconds, or "
            "`None`."
        )
    return Every(steps, seconds)


def _check_step(loop: "_Loop", state: Any, xs: Any) -> None:
    """Raise if a sample or a state does not fit, or `keep` does not return bools."""
    x = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
        jax.eval_shape(lambda xs: xs, xs),
    )

    def once(state: Any, x: Any) -> PyTree:
        state, sample = loop.step(state, x)
        checked_samples(sample, loop.leaves, loop.chains, one=True, traced=True)
        loop.kept(state, sample)
        return _without_arrays(state)

    after = dict(jtu.tree_leaves_with_path(eqx.filter_eval_shape(once, state, x)))
    for path, old in jtu.tree_leaves_with_path(_without_arrays(state)):
        if path in after and not eqx.tree_equal(old, after[path]):
            raise ValueError(
                f"`f` changes `state{jtu.keystr(path)}` from {shown(old)} to "
                f"{shown(after[path])}. In the state, only arrays and numbers can "
                "change: make it one."
            )


def _without_arrays(state: PyTree) -> PyTree:
    return eqx.filter(state, eqx.is_array_like, inverse=True)


class _Loop(NamedTuple):
    """What `record_scan` repeats; static for `eqx.filter_jit`."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    keep: Callable[[Any, Any], Any] | None
    thin: int
    chains: int | None
    leaves: tuple[Leaf, ...]

    def kept(self, state: Any, sample: Any) -> Any:
        """Whether to record the sample after which comes this state."""
        if self.keep is None:
            return None
        each = () if self.chains is None else (self.chains,)
        return checked_keep(self.keep(state, sample), (), each, verb="returns")


@eqx.filter_jit
def _block(
    loop: _Loop, arrays: PyTree, rest: PyTree, xs: PyTree, rows: int
) -> tuple[PyTree, list[Any], Any]:
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
        chosen = loop.kept(state, sample)
        found = checked_samples(
            sample, loop.leaves, loop.chains, one=True, traced=True
        ).arrays
        return arrays, (found, chosen)

    arrays, (samples, kept) = jax.lax.scan(row, arrays, xs, length=rows)
    if loop.chains is not None:
        samples = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), samples)
        kept = jax.tree.map(lambda x: x if x.ndim == 1 else x.T, kept)
    return arrays, samples, kept
