"""How the processes of a `jax.distributed` job agree, with a deadline.

They speak through JAX's coordination service, which needs no device and may be used by
any thread. It has no public door, so this is the only file that uses a private one.
"""

import functools as ft
import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from .._errors import CheckpointError


logger = logging.getLogger("eqx_ckpt")

DEADLINE = 300.0  # seconds
# The others wait a little longer than process 0, which tells them who is late.
_GRACE = 5.0
_T = TypeVar("_T")
_numbers = itertools.count()
_numbering = threading.Lock()
# Of the undertakings that this process takes part in.
_in_use: set[int] = set()
# What the service still has begins with this one.
_remembered = 0
_NOTHING = "Nothing was saved by this call."
_UNKNOWN = "Whether the checkpoint was saved is not known: look at the disk."
# What it means not to hear from process 0 about a topic.
_OUTCOMES = {
    "written": _UNKNOWN,
    "committed": _UNKNOWN,
    "retained": "The checkpoint was saved.",
}


class Group:
    """The processes of a job, in one common undertaking.

    Every process makes its groups in the same order, and so finds the same number for
    each. What they say is kept under that number and a topic, until none of them needs
    it any more.
    """

    def __init__(self, deadline: float) -> None:
        self.size = jax.process_count()
        self.index = jax.process_index()
        self._deadline = deadline
        with _numbering:
            self._number = next(_numbers)
            _in_use.add(self._number)
        weakref.finalize(self, _in_use.discard, self._number)
        self._client = _client()
        self.has_service = self._client is not None
        if not self.has_service:
            _warn()

    def gather(self, topic: str, value: Any) -> list[Any]:
        """What each process says; raises on all of them if one says nothing."""
        if self._client is None:
            return _gather_on_devices(value)
        self.say(topic, value)
        if self.index == 0:
            end = time.monotonic() + self._deadline
            values = [self._hear(topic, i, end) for i in range(self.size)]
            self._say(topic, "all", values)
        else:
            values = self._hear_first(topic, "all")
        late = [i for i, value in enumerate(values) if value is None]
        if late:
            raise self._too_late(topic, late)
        if self.index == 0:
            self._forget(min(first for _, first in values))
        return [value for value, _ in values]

    def by_first(self, topic: str, make: Callable[[], Any]) -> Any:
        """What process 0 makes; if it fails to, all of them raise."""
        if self.index != 0:
            said = self._from_first(topic)
            if "error" in said:
                raise from_json(0, said["error"])
            return said["value"]
        try:
            value = make()
        except BaseException as e:
            self._from_first(topic, {"error": to_json(e)})
            raise
        self._from_first(topic, {"value": value})
        return value

    def say(self, topic: str, value: Any) -> None:
        """Say something, and do not wait for the others."""
        if self._client is not None:
            self._say(topic, self.index, [value, min(_in_use.copy())])

    def said(self, topic: str) -> dict[int, Any]:
        """What processes have said so far."""
        who = range(0 if self._client is None else self.size)
        said = {i: self._said(topic, i) for i in who}
        return {i: value[0] for i, value in said.items() if value is not None}

    def _from_first(self, topic: str, value: Any = None) -> Any:
        if self._client is None:
            return _gather_on_devices(value)[0]
        if self.index == 0:
            return self._say(topic, "first", value)
        return self._hear_first(topic, "first")

    def _say(self, topic: str, who: int | str, value: Any) -> None:
        try:
            self._client.key_value_set(self._key(topic, who), json.dumps(value))
        except jax.errors.JaxRuntimeError as e:
            raise _failed(e) from e

    def _hear_first(self, topic: str, who: str) -> Any:
        value = self._hear(topic, who, time.monotonic() + self._deadline + _GRACE)
        if value is None:
            late = range(self.size) if who == "all" else [0]
            late = [i for i in late if self._said(topic, i) is None]
            raise self._too_late(topic, late or [0], _OUTCOMES.get(topic, _NOTHING))
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
                # Who was waited for after another may have answered long ago.
                return self._said(topic, who)
            raise _failed(e) from e
        return json.loads(text)

    def _said(self, topic: str, who: int | str) -> Any:
        """`None` if it has said nothing so far."""
        try:
            return json.loads(self._client.key_value_try_get(self._key(topic, who)))
        except jax.errors.JaxRuntimeError:
            return None

    def _forget(self, before: int) -> None:
        """Let the service forget the undertakings that have ended everywhere."""
        global _remembered
        with _numbering:
            numbers = range(_remembered, before)
            _remembered = max(_remembered, before)
        for number in numbers:
            self._client.key_value_delete(f"eqx_ckpt/{number}/")

    def _key(self, topic: str, who: int | str) -> str:
        return f"eqx_ckpt/{self._number}/{topic}/{who}"

    def _too_late(
        self, topic: str, late: list[int], outcome: str = _NOTHING
    ) -> CheckpointError:
        names = " and ".join(f"process {i}" for i in late)
        return CheckpointError(
            f"No answer from {names} of {self.size} within {self._deadline:g} seconds "
            f"({topic}). It has died, hangs, or is late: its own output may say more. "
            f"{outcome} A longer `deadline` gives it more time."
        )


def is_alone() -> bool:
    """Whether there is one process; asks no backend, which may not exist yet."""
    return not jax.distributed.is_initialized() or jax.process_count() == 1


def is_first() -> bool:
    return is_alone() or jax.process_index() == 0


def group_of(deadline: float) -> Group | None:
    """The processes of the job, unless there is but one."""
    return None if is_alone() else Group(deadline)


def by_first(topic: str, make: Callable[[], _T], deadline: float) -> _T:
    """What process 0 makes, in every process."""
    group = group_of(deadline)
    return make() if group is None else group.by_first(topic, make)


def by_all(
    topic: str, make: Callable[[], _T], deadline: float
) -> tuple[_T | None, Exception | None]:
    """What this process makes, and the first failure of any process."""
    group = group_of(deadline)
    made = error = None
    try:
        made = make()
    except Exception as e:
        error = e
    if group is not None:
        errors = group.gather(topic, None if error is None else to_json(error))
        others = (from_json(i, e) for i, e in enumerate(errors) if e is not None)
        error = error or next(others, None)
    return made, error


def any_says(topic: str, value: bool, deadline: float) -> bool:
    """Whether it is `True` in any process."""
    group = group_of(deadline)
    return value if group is None else any(group.gather(topic, value))


def to_json(error: BaseException) -> dict[str, Any]:
    """An error, as it is told to another process."""
    number = error.errno if isinstance(error, OSError) else None
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return {"kind": type(error).__name__, "text": text, "errno": number}


def from_json(index: int, error: dict[str, Any]) -> Exception:
    """The error of another process, of the same type if it is one of ours."""
    text = f"Process {index} failed: {error['kind']}: {error['text']}"
    for kind in CheckpointError.__subclasses__():
        if kind.__name__ == error["kind"]:
            return kind(text)
    if error["errno"] is not None:
        return OSError(error["errno"], text)
    return CheckpointError(text)


def _failed(error: Exception) -> CheckpointError:
    return CheckpointError(
        "JAX's coordination service, which runs in process 0, failed, so that the "
        f"processes cannot agree. Has process 0 died? {error}"
    )


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
