"""Heartbeats of attempts in a bucket, where there are no locks.

A manager watches whether anything changes below an attempt, so the clocks of two
machines are never compared.
"""

import itertools
import logging
import threading
import time

from ..._errors import CheckpointError
from ..calls.threads import start
from .keyvalue_place import KeyValues
from .store_patience import LAST_PATIENCE


logger = logging.getLogger("eqx_ckpt")


# Seconds without a change after which a manager deletes an attempt; after which the
# attempt fails by itself, which is sooner; and between two heartbeats.
ORPHANED_AFTER = 600.0


FAIL_AFTER = 300.0


INTERVAL = 60.0


_KEY = "alive"


# A key that is there from the beginning if other processes write too.
SHOWN = f"{_KEY}.shown"


class Heartbeat:
    """A thread that writes below the prefix of an attempt while it lasts.

    If no thread starts any more, `check` allows a save that takes less than
    `FAIL_AFTER`.
    """

    def __init__(self, place: KeyValues) -> None:
        self._place = place
        self._last = clock()
        self._longest = 0.0
        self._is_shown = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._is_beating = start(self._thread)

    def _beat(self) -> None:
        for number in itertools.count():
            is_last = self._ended.wait(INTERVAL)
            try:
                if not is_last:
                    now = clock()
                    self._place.write(f"{_KEY}.{number}", b"1")
                    self._longest = max(self._longest, now - self._last)
                    self._last = now
                shown = [SHOWN] if is_last and self._is_shown else []
                beats = [f"{_KEY}.{number - 1}"] if number else []
                self._place.delete(beats + shown)
            except (OSError, CheckpointError) as e:
                logger.debug("No heartbeat in %s: %s", self._place, e)
            if is_last:
                return

    def show(self) -> None:
        """Write a key at once, which shows to other processes that this is there."""
        self._is_shown = True
        self._place.write(SHOWN, b"1")

    def is_late(self) -> bool:
        """Whether a manager could have declared this attempt dead, now or before."""
        return self._silence() > FAIL_AFTER

    def _silence(self) -> float:
        return max(self._longest, clock() - self._last)

    def check(self) -> None:
        if self.is_late():
            raise CheckpointError(
                f"For {self._silence():.0f} seconds this save was suspended, or could "
                f"not reach {self._place}, and a manager may have removed its data "
                "meanwhile. Nothing was saved; save again."
            )

    def end(self) -> None:
        self._ended.set()
        if self._is_beating:
            self._thread.join(LAST_PATIENCE)


def clock() -> float:
    """Seconds of a clock that nobody sets, and that runs during a suspension."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
