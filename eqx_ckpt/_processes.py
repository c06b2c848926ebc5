"""How the processes of a `jax.distributed` job agree, with a deadline.

They speak through JAX's coordination service, which needs no device and may be used by
any thread. It has no public door, so this is the only file that uses a private one.
"""

import itertools
import json
import logging
import time
from typing import Any

import jax
import numpy as np

from ._errors import CheckpointError


logger = logging.getLogger("eqx_ckpt")

DEADLINE = 300.0  # seconds
# The others wait a little longer than process 0, which tells them who is late.
_GRACE = 5.0
# How many undertakings are remembered by the service.
_REMEMBERED = 16
_numbers = itertools.count()


class Group:
    """The processes of a job, in one common undertaking.

    Every process makes its groups in the same order, and so finds the same number for
    each. What they say is kept under that number and a topic.
    """

    def __init__(self, deadline: float) -> None:
        self.size = jax.process_count()
        self.index = jax.process_index()
        self._deadline = deadline
        self._number = next(_numbers)
        self._client = _client()
        if self._client is None:
            logger.warning(
                "This JAX has no coordination service that eqx_ckpt knows: processes "
                "wait for each other without a deadline, in the main thread only."
            )
        elif self.index == 0 and self._number >= _REMEMBERED:
            self._client.key_value_delete(f"eqx_ckpt/{self._number - _REMEMBERED}/")

    def gather(self, topic: str, value: Any) -> list[Any]:
        """What each process says; raises on all of them if one says nothing."""
        if self._client is None:
            return _gather_on_devices(value)
        self._say(topic, self.index, value)
        if self.index == 0:
            end = time.monotonic() + self._deadline
            values = [self._hear(topic, i, end) for i in range(self.size)]
            self._say(topic, "all", values)
        else:
            values = self._hear_first(topic, "all")
        late = [i for i, value in enumerate(values) if value is None]
        if late:
            raise self._too_late(topic, late)
        return [value[0] for value in values]

    def from_first(self, topic: str, value: Any = None) -> Any:
        """What process 0 says; the others listen."""
        if self._client is None:
            return _gather_on_devices(value)[0]
        if self.index == 0:
            self._say(topic, 0, value)
            return value
        return self._hear_first(topic, 0)[0]

    def _say(self, topic: str, who: int | str, value: Any) -> None:
        value = value if who == "all" else [value]
        self._client.key_value_set(self._key(topic, who), json.dumps(value))

    def _hear_first(self, topic: str, who: int | str) -> Any:
        value = self._hear(topic, who, time.monotonic() + self._deadline + _GRACE)
        if value is None:
            raise self._too_late(topic, [0])
        return value

    def _hear(self, topic: str, who: int | str, end: float) -> Any:
        """`None` if nothing was said until the end."""
        milliseconds = max(1, int(1000 * (end - time.monotonic())))
        try:
            text = self._client.blocking_key_value_get(
                self._key(topic, who), milliseconds
            )
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" in str(e):
                return None
            raise CheckpointError(
                f"JAX's coordination service failed, so that the processes cannot "
                f"agree: {e}"
            ) from e
        return json.loads(text)

    def _key(self, topic: str, who: int | str) -> str:
        return f"eqx_ckpt/{self._number}/{topic}/{who}"

    def _too_late(self, topic: str, late: list[int]) -> CheckpointError:
        names = "process " + " and process ".join(map(str, late))
        return CheckpointError(
            f"No answer from {names} of {self.size} within {self._deadline:g} seconds "
            f"({topic}). It has died, hangs, or is late: its own output may say more. "
            "Nothing was saved by this call; a longer `deadline` gives it more time."
        )


def is_alone() -> bool:
    """Whether there is one process; asks no backend, which may not exist yet."""
    return not jax.distributed.is_initialized() or jax.process_count() == 1


def is_first() -> bool:
    return is_alone() or jax.process_index() == 0


def said_by_first(topic: str, value: Any, deadline: float) -> Any:
    """The value that process 0 has, in every process."""
    return value if is_alone() else Group(deadline).from_first(topic, value)


def said_by_all(topic: str, value: Any, deadline: float) -> list[Any]:
    """The values of all processes."""
    return [value] if is_alone() else Group(deadline).gather(topic, value)


def _client() -> Any:
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    return getattr(global_state, "client", None)


def _gather_on_devices(value: Any) -> list[Any]:
    """The public way: a collective of all devices, which has no deadline."""
    from jax.experimental.multihost_utils import process_allgather

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = process_allgather(np.array([data.size])).ravel()
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = process_allgather(padded)
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]
