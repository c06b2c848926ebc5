"""Messages between the processes of a `jax.distributed` job.

JAX's coordination service holds them. It needs no device, and any thread may use it. It
has no public API, so this is the only file that uses the private one.
"""

import functools as ft
import json
import logging
import time
from typing import Any

import jax
import numpy as np

from .._errors import CheckpointError


logger = logging.getLogger("eqx_ckpt")


# Seconds in which `jax.distributed.shutdown()` ends, once it makes other calls fail.
_SHUTDOWN = 5


class Service:
    """Values under keys, which all processes of the job see."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Service) and other.client is self.client

    def set(self, key: str, value: Any, *, again: bool = False) -> None:
        self._ask(self.client.key_value_set, key, json.dumps(value), again)

    def decide(self, key: str, value: Any) -> Any:
        """Set the value unless another process has; return the one that is there."""
        found = None
        while found is None:
            try:
                self.client.key_value_set(key, json.dumps(value), False)
            except jax.errors.JaxRuntimeError as e:
                if not str(e).startswith("ALREADY_EXISTS"):
                    raise self._failed(e) from e
                # Empty, if the value was deleted in the meantime.
                found = self.look(key)
            else:
                found = value
        return found

    def wait(self, key: str, seconds: float) -> Any:
        """Wait for the value; `None` if there is none in time."""
        milliseconds = max(1, int(1000 * seconds))
        text = self._ask(self.client.blocking_key_value_get, key, milliseconds)
        # Processes are awaited in turn, so this one may have answered long ago.
        return self.look(key) if text is None else json.loads(text)

    def look(self, key: str) -> Any:
        """The value; `None` if there is none yet."""
        text = self._ask(self.client.key_value_try_get, key)
        return None if text is None else json.loads(text)

    def below(self, prefix: str) -> dict[str, Any]:
        found = self._ask(self.client.key_value_dir_get, prefix) or ()
        return {key.removeprefix(prefix): json.loads(text) for key, text in found}

    def count(self, key: str) -> int:
        """How often any process, living or dead, has called this with the key."""
        return int(self._ask(self.client.key_value_increment, key, 1))

    def delete(self, key: str) -> None:
        self._ask(self.client.key_value_delete, key)

    def _ask(self, method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except jax.errors.JaxRuntimeError as e:
            if str(e).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
                return None
            raise self._failed(e) from e

    def _failed(self, error: Exception) -> CheckpointError:
        if self._is_shut_down(error):
            return CheckpointError(
                "`jax.distributed.shutdown()` was called before this call, or a save "
                "in the background, had ended. Wait first: call `close()` or `wait()` "
                "of the manager, or `result()` of the future. Whether a save has "
                "succeeded is not known: look at the disk."
            )
        return CheckpointError(
            "JAX's coordination service, which runs in process 0, failed, so that the "
            f"processes cannot agree. Has process 0 died? {error}"
        )

    def _is_shut_down(self, error: Exception) -> bool:
        """Whether this process called `jax.distributed.shutdown()`.

        That cancels the calls that wait, then stops the service, and only then forgets
        the client.
        """
        end = time.monotonic() + _SHUTDOWN
        is_cancelled = str(error).startswith("CANCELLED")
        while _client() is self.client and not is_cancelled:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True


def service() -> Service | None:
    """The service of this job; `None` if this version of JAX has none that is known."""
    client = _client()
    if client is None:
        _warn()
        return None
    return Service(client)


def is_alone() -> bool:
    """Whether there is one process; does not initialise a backend."""
    return not jax.distributed.is_initialized() or jax.process_count() == 1


def is_first() -> bool:
    return is_alone() or jax.process_index() == 0


def gather_on_devices(value: Any) -> list[Any]:
    """The public alternative: a collective over all devices, without a deadline."""
    from jax.experimental.multihost_utils import process_allgather

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = process_allgather(np.array([data.size])).ravel()
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = process_allgather(padded)
    return [
        json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


@ft.cache
def _warn() -> None:
    logger.warning(
        "This JAX has no coordination service that eqx_ckpt knows. Processes wait for "
        "each other without a deadline, and saves do not go on in the background."
    )


def _client() -> Any:
    try:
        from jax._src.distributed import global_state
    except ImportError:
        return None
    return getattr(global_state, "client", None)
