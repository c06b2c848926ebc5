"""Give the samples of compiled programs to a function."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._errors import besides
from .._types import check_function, check_optional_integer
from ._recorder import make_recorder, Recorder
from ._writing._sample_leaves import leaves_of
from ._writing._sample_receiver import Receiver, Taker


class Collector:
    """Give the samples of compiled programs to a function, instead of a recording.

    A [`eqx_ckpt.recording.Recording`][] writes what its recorders send to a disk or a
    store. A collector sends it anywhere else: to a plot, a database, another machine.

    !!! example

        ```python
        import eqx_ckpt
        import jax
        import jax.numpy as jnp

        found = []

        def collect(chain, samples):
            found.append((chain, samples["x"].tolist()))

        @jax.jit
        def run(recorder):
            def step(i, recorder):
                return recorder.save({"x": i * 1.0})

            return jax.lax.fori_loop(0, 5, step, recorder).flush()

        with eqx_ckpt.recording.Collector({"x": jnp.float32(0)}, collect) as collector:
            run(collector.recorder(block=3))
        assert found == [(0, [0, 1, 2]), (0, [3, 4])]
        ```
    """

    def __init__(
        self,
        like: PyTree,
        collect: Callable[[int, PyTree], Any],
        *,
        chains: int | None = None,
    ) -> None:
        """**Arguments:**

        - `like`: one sample of one chain: a PyTree of arrays, or of
            `jax.ShapeDtypeStruct`s.
        - `collect`: a function `collect(chain, samples)`. `samples` are like `like`,
            NumPy arrays with an axis for draws in front; typed PRNG keys are their key
            data. It is called by one thread at a time, in the order of the draws of a
            chain, and must not use JAX.
        - `chains`: as in [`eqx_ckpt.recording.Recording`][]. Without it, `chain` is 0.
        """
        chains = check_optional_integer("chains", chains, 1)
        check_function("collect", collect)
        self._leaves = leaves_of(like, chains, None, None)
        self._chains = chains
        self._taker = _ToFunction(jtu.tree_structure(like), collect)
        self._receivers: list[Receiver] = []

    def recorder(
        self, *, block: int | None = None, sharding: NamedSharding | None = None
    ) -> Recorder:
        """Create a recorder, as `recorder` of [`eqx_ckpt.recording.Recording`][]."""
        receiver, recorder = make_recorder(
            self._taker, self._leaves, self._chains, block, sharding
        )
        self._receivers.append(receiver)
        return recorder

    def close(self) -> None:
        """Wait for running programs, and raise what was not raised yet.

        **Raises:**

        - What `collect` has raised; no further samples were given to it.
        - [`eqx_ckpt.CheckpointError`][]: samples are still in a recorder on the device,
            or an older recorder was used again.
        """
        if self._receivers:
            jax.effects_barrier()
        self._receivers.clear()
        self._taker.end()

    def __enter__(self) -> "Collector":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with besides(error, "the collector"):
            self.close()


class _ToFunction(Taker):
    """Gives samples to a function."""

    def __init__(self, structure: Any, collect: Callable[[int, PyTree], Any]) -> None:
        super().__init__()
        self._structure = structure
        self._collect = collect

    def receive(self, chain: int, arrays: Sequence[np.ndarray], count: int) -> bool:
        if self.failure is not None:
            return False
        try:
            self._collect(chain, self._structure.unflatten(arrays))
        except BaseException as e:
            self.fail(e)
        return self.failure is None

    def end(self) -> None:
        with self.lock:
            failure = self.failure or self.refusal
            self.failure = self.refusal = None
            if failure is not None:
                raise failure
            self.check_flushed("Samples were not collected")
