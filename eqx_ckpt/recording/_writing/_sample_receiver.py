"""The host's end of a recorder: takes the samples that compiled programs send."""

import abc
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..._errors import CheckpointError
from ..._format.sample_record import Leaf


_NUMBERS = itertools.count(1)


# A compiled program holds only a number: so it works with any recording, and keeps no
# recording alive.
_receivers: "weakref.WeakValueDictionary[int, Receiver]" = weakref.WeakValueDictionary()


class Taker(abc.ABC):
    """What receivers give their samples to. Its methods never raise.

    **Attributes:**

    - `lock`: held while samples are taken.
    - `failure`: after it, no samples are taken.
    - `refusal`: samples that were not taken; those before them are intact.
    - `has_gap`: whether there ever was a `refusal`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.failure: BaseException | None = None
        self.refusal: CheckpointError | None = None
        self.has_gap = False
        self._on_device: set[tuple[int, int]] = set()

    @abc.abstractmethod
    def receive(self, chain: int, arrays: Sequence[np.ndarray], count: int) -> bool:
        """Take samples of a chain; return whether all of them were taken."""

    def begin_block(self, recorder: int, chain: int) -> None:
        """Note that a recorder has samples of a chain on the device."""
        with self.lock:
            self._on_device.add((recorder, chain))

    def end_block(
        self, recorder: int, chain: int, arrays: Sequence[np.ndarray], count: int
    ) -> bool:
        """Take these samples; return whether all of them were taken."""
        with self.lock:
            self._on_device.discard((recorder, chain))
            return self.receive(chain, arrays, count)

    def refuse(self, error: CheckpointError, recorder: int | None = None) -> None:
        """Raise this to the user; nothing more comes from this recorder."""
        with self.lock:
            self._on_device = {pair for pair in self._on_device if pair[0] != recorder}
            self.refusal = self.refusal or error
            self.has_gap = True

    def fail(self, error: BaseException) -> None:
        """Raise this to the user, and take nothing more."""
        self.failure = self.failure or error

    def check_flushed(self, problem: str) -> None:
        """Raise if a recorder has samples on the device."""
        chains = sorted({chain for _, chain in self._on_device})
        if chains:
            some = ", ".join(map(str, chains[:8])) + ", ..." * (len(chains) > 8)
            raise CheckpointError(
                f"{problem}, because samples of chains {some} are in a recorder on the "
                f"device. Call `recorder = recorder.flush()` at the end of the program."
            )


class Receiver:
    """Puts the blocks of one recorder in order, and notices those that are missing.

    **Attributes:**

    - `number`: by which compiled programs refer to it.
    """

    def __init__(self, taker: Taker, leaves: Sequence[Leaf], chains: int) -> None:
        self._taker = taker
        self._leaves = leaves
        self._turns = [0] * chains
        self._begun: set[int] = set()
        self._is_spent = False
        # What came from some of the devices that have the same chain.
        self._replicated: dict[tuple[int, int, bool], tuple[bool, int]] = {}
        self._lock = threading.Lock()
        self.number = next(_NUMBERS)
        _receivers[self.number] = self

    def receive(
        self, replicas: int, begun: Any, due: Any, small: list[Any], rows: list[Any]
    ) -> bool:
        """Queue samples; return whether all of them were taken. Never raises."""
        took = True
        try:
            with self._lock:
                for i in np.flatnonzero(begun):
                    chain, turn, _ = (int(x[i]) for x in small)
                    begin = functools.partial(self._begin, chain, turn)
                    took &= self._once((chain, turn, False), replicas, begin)
                for i in np.flatnonzero(due):
                    chain, turn, count = (int(x[i]) for x in small)
                    some = [array[i] for array in rows]
                    take = functools.partial(self._take, chain, turn, count, some)
                    took &= self._once((chain, turn, True), replicas, take)
        except BaseException as e:
            self._taker.fail(e)
            return False
        return took

    def _once(
        self, key: tuple[int, int, bool], replicas: int, do: Callable[[], bool]
    ) -> bool:
        """Do what the first of the devices that have the same chain asks for."""
        if replicas == 1:
            return do()
        took, left = self._replicated.pop(key, (None, replicas))
        took = do() if took is None else took
        if left > 1:
            self._replicated[key] = took, left - 1
        return took

    def _begin(self, chain: int, turn: int) -> bool:
        if not self._is_next(chain, turn) or chain in self._begun:
            return self._refuse(chain)
        self._begun.add(chain)
        self._taker.begin_block(self.number, chain)
        return True

    def _take(self, chain: int, turn: int, count: int, rows: list[np.ndarray]) -> bool:
        if not self._is_next(chain, turn):
            return self._refuse(chain)
        self._turns[chain] += 1
        self._begun.discard(chain)
        arrays = [
            array[: count * math.prod(leaf.record.data_shape)].reshape(
                count, *leaf.record.data_shape
            )
            for array, leaf in zip(rows, self._leaves, strict=True)
        ]
        return self._taker.end_block(self.number, chain, arrays, count)

    def _is_next(self, chain: int, turn: int) -> bool:
        return not self._is_spent and turn == self._turns[chain]

    def _refuse(self, chain: int) -> bool:
        if not self._is_spent:
            self._is_spent = True
            error = CheckpointError(
                f"An older recorder was used again, for chain {chain}, and its samples "
                "were refused. Continue with the recorder that `save` returns, or make "
                "a new one with `recording.recorder()`."
            )
            self._taker.refuse(error, self.number)
        return False


def receive(
    replicas: Any, failed: Any, number: Any, begun: Any, due: Any, *rest: Any
) -> np.ndarray:
    """Give what a program sends to its receiver; return whether that has failed."""
    *small, pieces = rest
    found = [[np.asarray(piece) for piece in some] for some in pieces]
    rows = [some[0] if len(some) == 1 else np.concatenate(some, 1) for some in found]
    failed, number, begun, due, *small = map(
        np.asarray, (failed, number, begun, due, *small)
    )
    receiver = _receivers.get(int(number[0]))
    if receiver is None:
        return np.ones_like(failed)
    took = receiver.receive(int(replicas), begun, due, small, rows)
    return failed | (not took)
