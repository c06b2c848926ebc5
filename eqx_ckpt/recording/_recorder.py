"""Record samples from inside a compiled program, through any loop or transformation."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array, PyTree

from .._format.leaf_record import dtype_from_tag
from .._format.sample_record import Leaf
from .._types import check_optional_integer
from ._sample_buffer import gathered, put
from ._writing._sample_leaves import check_on_device, checked_keep, checked_samples
from ._writing._sample_receiver import receive, Receiver, Taker


# As a chunk by default.
_BLOCK_BYTES = 2**20


_MAX_BLOCK = 1024


# Before JAX 0.12, a callback with an argument of 100 KiB or more can deadlock on
# several CPU devices, so arrays are passed in pieces.
_PIECE_BYTES = 96 * 2**10 if jax.__version_info__ < (0, 12) else 2**40


class _Chains(NamedTuple):
    """The arrays of a recorder, with one row for each of its chains."""

    failed: Any
    number: Any
    chain: Any
    turn: Any
    count: Any
    rows: Any


def _saved(chains: _Chains, sample: list[Array], keep: Array, replicas: int) -> _Chains:
    """Put a sample into the rows; send those of the chains that are full."""
    block = chains.rows[0].shape[keep.ndim]
    index = jnp.where(keep, chains.count, block)
    rows = [put(*pair, index) for pair in zip(chains.rows, sample, strict=True)]
    count = chains.count + keep.astype(jnp.int32)
    due = count == block
    begun = keep & (chains.count == 0) & ~due
    return _sent(chains._replace(rows=rows, count=count), due, begun, replicas)


def _flushed(chains: _Chains, replicas: int) -> _Chains:
    """Send all rows that have samples."""
    due = chains.count > 0
    return _sent(chains, due, jnp.zeros_like(due), replicas)


def _sent(chains: _Chains, due: Array, begun: Array, replicas: int) -> _Chains:
    """Send the rows that are due to the host.

    Where `begun`, a first sample was put into the rows: the host then waits for them.
    As each call takes the result of the previous one, calls come in order.
    """
    lead = due.shape
    size = math.prod(lead)
    failed, number, chain, turn, count, rows = chains

    def call(rows: list[Array]) -> Array:
        small = (failed, number, begun, due, chain, turn, count)
        small = [x.reshape(size) for x in small]
        pieces = [_pieces(x.reshape(size, x.size // size)) for x in rows]
        result = jax.ShapeDtypeStruct((size,), np.bool_)
        took = io_callback(receive, result, replicas, *small, pieces)
        return took.reshape(lead) | failed

    which = jnp.where(jnp.any(due), 2, jnp.where(jnp.any(begun), 1, 0))
    branches = [lambda: failed, lambda: call([]), lambda: call(rows)]
    return chains._replace(
        failed=jax.lax.switch(which, branches),
        turn=turn + due.astype(jnp.uint32),
        count=jnp.where(due, 0, count),
    )


@functools.cache
def _for_chains(
    function: Callable[..., _Chains], sharding: NamedSharding | None
) -> Callable[..., _Chains]:
    """A function of arrays that all have a first axis for each `vmap`.

    So the predicate of the `switch` is never batched: JAX allows no callback in a
    batched `cond`. If the first axis is sharded, each device decides for its own
    chains, and sends their samples itself.
    """

    def with_all(*args: Any) -> _Chains:
        place = _place_of(args[0].count, sharding)
        if place is None:
            manual = jax.sharding.get_abstract_mesh().manual_axes
            replicas = 1 if sharding is None else _replicas(sharding, manual)
            return function(args[0], *map(gathered, args[1:]), replicas)
        return _on_each_device(function, place, args)

    def batched(size: int, is_batched: Any, *args: Any) -> tuple[Any, Any]:
        args = jax.tree.map(
            lambda x, batched: (
                x if batched else jnp.broadcast_to(x, (size, *jnp.shape(x)))
            ),
            args,
            tuple(is_batched),
        )
        found = call(*args)
        return found, jax.tree.map(lambda _: True, found)

    call = custom_vmap(with_all)
    call.def_vmap(batched)
    return call


def _replicas(sharding: NamedSharding, among: Sequence[str]) -> int:
    """On how many devices along these axes each chain is."""
    names = _names(sharding)
    sizes = sharding.mesh.shape.items()
    return math.prod(n for name, n in sizes if name in among and name not in names)


def _names(sharding: NamedSharding) -> tuple[str, ...]:
    axes = sharding.spec[0]
    return axes if isinstance(axes, tuple) else (axes,)


def _on_each_device(
    function: Callable[..., _Chains], sharding: NamedSharding, args: Any
) -> _Chains:
    """Call the function on each device, with the chains that are there."""
    mesh, names = sharding.mesh, _names(sharding)
    replicas = _replicas(sharding, mesh.axis_names)
    spec = P(names)
    if AxisType.Explicit in mesh.axis_types:
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        typed = tuple(name for name in names if kinds[name] == AxisType.Explicit)
        place = NamedSharding(mesh, P(typed or None))
        if jax.__version_info__ < (0, 10):
            # Its `shard_map` fails inside of `vmap` here: one device sends all chains.
            whole = NamedSharding(mesh, P())
            args = jax.tree.map(lambda x: jax.sharding.reshard(x, whole), args)
            found = function(*args, 1)
            return jax.tree.map(lambda x: jax.sharding.reshard(x, place), found)
        args = jax.tree.map(lambda x: jax.sharding.reshard(x, place), args)
    local = jax.shard_map(
        lambda *args: function(*args, replicas),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return local(*args)


def _place_of(count: Array, sharding: NamedSharding | None) -> NamedSharding | None:
    """How the first axis is sharded, if it is, and not inside of `shard_map`."""
    if not count.ndim:
        return None
    if sharding is None:
        found: Any = jax.typeof(count).sharding
        sharding = found
    if sharding is None or not sharding.spec or sharding.spec[0] is None:
        return None
    around = jax.sharding.get_abstract_mesh()
    return None if AxisType.Manual in around.axis_types else sharding


def _pieces(rows: Array) -> list[Array]:
    width = max(1, _PIECE_BYTES // (rows.shape[0] * rows.dtype.itemsize))
    return [rows[:, i : i + width] for i in range(0, rows.shape[1], width)] or [rows]


class Recorder(eqx.Module):
    """Records samples from inside a compiled program; made by `Recording.recorder`.

    It is an `equinox.Module`: carry it through `jit`, `scan`, `while_loop`, `cond` and
    `vmap`. If the recording has chains, the first axis of each of its arrays is the
    chain: pass the recorder through `vmap` together with the states.

    **Attributes:**

    - `failed`: whether the host could not record samples. End the loop then; the next
        call of the recording raises the reason.

    !!! example

        ```python
        import eqx_ckpt
        import jax
        import jax.numpy as jnp

        @jax.jit
        def program(recorder):
            def step(i, recorder):
                return recorder.save({"i": i})

            return jax.lax.fori_loop(0, 5, step, recorder).flush()

        like = {"i": jnp.int32(0)}
        with eqx_ckpt.recording.Recording("run", like) as recording:
            recorder = program(recording.recorder())
            assert not recorder.failed
        assert eqx_ckpt.recording.Samples("run").committed == 5
        ```
    """

    failed: Array
    _number: Array
    _chain: Array
    _turn: Array
    _count: Array
    _rows: list[Array]
    _leaves: tuple[Leaf, ...] = eqx.field(static=True)
    _sharding: NamedSharding | None = eqx.field(static=True)

    def __init__(
        self,
        number: int,
        leaves: Sequence[Leaf],
        chains: int | None,
        block: int,
        sharding: NamedSharding | None,
    ) -> None:
        lead = () if chains is None else (chains,)
        arrays = _Chains(
            failed=jnp.zeros(lead, bool),
            number=jnp.full(lead, number, jnp.int32),
            chain=jnp.arange(chains or 1, dtype=jnp.int32).reshape(lead),
            turn=jnp.zeros(lead, jnp.uint32),
            count=jnp.zeros(lead, jnp.int32),
            rows=[
                jnp.zeros((*lead, block, *leaf.record.data_shape), _dtype(leaf))
                for leaf in leaves
            ],
        )
        if sharding is not None:
            arrays = jax.device_put(arrays, sharding)
        self.failed, self._number, self._chain, self._turn, self._count, self._rows = (
            arrays
        )
        self._leaves = tuple(leaves)
        self._sharding = sharding

    def save(self, sample: PyTree, keep: Any = True) -> "Recorder":
        """Return the recorder with one more sample.

        **Arguments:**

        - `sample`: a PyTree like the `like` of the recording.
        - `keep`: whether to record it; `bool[]`, or `bool[chain]`.

        **Raises:**

        - [`eqx_ckpt.LeafMismatchError`][]: the sample does not match `like`.
        - `ValueError`: `keep` has a different shape or dtype.
        """
        lead = self._count.shape
        chains = lead[0] if lead else None
        if len(lead) > 1:
            raise ValueError(
                "Pass the recorder through `vmap` together with the states."
            )
        checked = checked_samples(sample, self._leaves, chains, one=True, traced=True)
        check_on_device(self._leaves)
        keep = jnp.broadcast_to(checked_keep(keep, (), lead), lead)
        return self._after(_saved, [_data(array) for array in checked.arrays], keep)

    def flush(self) -> "Recorder":
        """Return the recorder after sending all of its samples to the host.

        Call it at the end of the program: until then, up to one block of samples is
        only on the device, and the recording cannot be committed.
        """
        return self._after(_flushed)

    def _after(self, function: Callable[..., _Chains], *args: Any) -> "Recorder":
        small = (self.failed, self._number, self._chain, self._turn, self._count)
        chains = _for_chains(function, self._sharding)(
            _Chains(*small, self._rows), *args
        )
        return eqx.tree_at(
            lambda r: (r.failed, r._turn, r._count, r._rows),
            self,
            (chains.failed, chains.turn, chains.count, chains.rows),
        )


def _dtype(leaf: Leaf) -> np.dtype:
    is_key = leaf.record.kind == "key"
    return np.dtype(np.uint32) if is_key else dtype_from_tag(leaf.record.dtype)


def _data(array: Any) -> Array:
    """The data of an array inside a program; those of PRNG keys are integers."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return jax.lax.stop_gradient(jnp.asarray(array))


def make_recorder(
    taker: Taker,
    leaves: Sequence[Leaf],
    chains: int | None,
    block: int | None,
    sharding: NamedSharding | None,
) -> tuple[Receiver, Recorder]:
    """A recorder, and the host's end of it, which must live as long."""
    block = check_optional_integer("block", block, 1) or default_block(leaves, chains)
    if sharding is not None:
        sharding = _over_chains(sharding, chains)
    check_on_device(leaves)
    receiver = Receiver(taker, leaves, chains or 1)
    return receiver, Recorder(receiver.number, leaves, chains, block, sharding)


def default_block(leaves: Sequence[Leaf], chains: int | None) -> int:
    """How many samples to send at a time: so many that it hardly slows a step.

    They fill one chunk or two, as the chunks of small samples have more of them.
    """
    nbytes = sum(leaf.row_bytes for leaf in leaves) * (chains or 1)
    rows = max(1, _BLOCK_BYTES // max(1, nbytes))
    return 2 * rows if 2 * rows <= _MAX_BLOCK else min(rows, _MAX_BLOCK)


def _over_chains(sharding: NamedSharding, chains: int | None) -> NamedSharding:
    """The sharding of arrays whose first axis is that of the chains."""
    axes = [axis for axis in sharding.spec if axis is not None]
    if chains is None:
        problem = "the recording has no `chains`"
    elif len(axes) != 1 or sharding.spec[0] is None:
        problem = "it does not shard the first axis, and only that"
    else:
        first = NamedSharding(sharding.mesh, P(*axes))
        try:
            first.shard_shape((chains,))
            return first
        except ValueError:
            problem = f"{chains} chains cannot be split into that many equal parts"
    raise ValueError(f"`sharding` is {sharding}, and {problem}.")
