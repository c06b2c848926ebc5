"""Bytes that processes of a job send to all others, over the network of the devices."""

import functools as ft
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from .._errors import CheckpointError
from .._storage.calls.threads import in_thread
from .process_group import Group, Solo


# What is on its way at a time: so much on each device, twice.
_BUFFER_BYTES = 8 * 2**20


_SMALLEST = 2**12


class Broadcast:
    """What some processes send, one after another, in buffers that all of them get.

    All have to iterate to the end, or the others wait.

    **Attributes:**

    - `error`: why this process could not send what it was to send. It has sent zeros.
    """

    def __init__(
        self, group: Group | Solo, sizes: Sequence[Sequence[int]], timeout: float
    ) -> None:
        """`sizes` has each process that sends something, and how many bytes."""
        self._index = group.index
        self._sizes = sizes
        self._timeout = timeout
        self.error: Exception | None = None

    def buffers(self, mine: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        """Send arrays of bytes; return what each process sends, with its number."""
        most = max((nbytes for _, nbytes in self._sizes), default=0)
        size = min(_BUFFER_BYTES, max(_SMALLEST, 1 << (most - 1).bit_length()))
        for process, nbytes in self._sizes:
            stream = self._sent(mine, size) if process == self._index else None
            for begin in range(0, nbytes, size):
                data = np.zeros(size, np.uint8) if stream is None else next(stream)
                found = _within(self._timeout, data, is_source=stream is not None)
                yield process, found[: nbytes - begin]

    def _sent(self, mine: Iterable[np.ndarray], size: int) -> Iterator[np.ndarray]:
        """Buffers of a size, without end."""
        buffer, filled = np.zeros(size, np.uint8), 0
        try:
            for array in mine:
                rest = array
                while rest.size:
                    part, rest = np.split(rest, [size - filled])
                    buffer[filled : filled + part.size] = part
                    filled += part.size
                    if filled == size:
                        yield buffer
                        buffer, filled = np.zeros(size, np.uint8), 0
        except Exception as e:  # The others wait for all of the bytes.
            self.error, buffer = e, np.zeros(size, np.uint8)
        while True:
            yield buffer


def _within(seconds: float, data: np.ndarray, *, is_source: bool) -> np.ndarray:
    """A buffer, as the process that is its source has it; raise if that takes longer.

    A thread has none of the settings of JAX that the caller has made for a block.
    """
    send = ft.partial(_by_devices, data if is_source else np.zeros_like(data))
    found = in_thread(send, "eqx_ckpt sends bytes to other processes")
    try:
        return found.result(seconds)
    except TimeoutError:
        raise CheckpointError(
            f"No bytes have arrived from another process for {seconds:g} seconds. The "
            "processes still wait for them on their devices: restart the job."
        ) from None
    except Exception as e:
        raise CheckpointError(f"The processes cannot send each other bytes: {e}") from e


def _by_devices(data: np.ndarray) -> np.ndarray:
    """The sum of what all processes have: one of them has something else than zeros.

    Of each process, the first device takes part, as they may have different numbers.
    """
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[i] for i in sorted(first)]), ("process",))
    own = first[jax.process_index()]
    with jax.transfer_guard("allow"):
        words = jax.device_put(data.view(np.uint32)[None], own)
        shape, sharding = (mesh.size, words.size), NamedSharding(mesh, P("process"))
        all = jax.make_array_from_single_device_arrays(shape, sharding, [words])
        total = _sum(NamedSharding(mesh, P()))(all)
        return np.asarray(total.addressable_data(0)).view(np.uint8)


@ft.cache
def _sum(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(
        lambda words: words.sum(axis=0, dtype=words.dtype), out_shardings=sharding
    )
