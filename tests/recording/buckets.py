"""What processes do with a recording in an object store; they may be killed there."""

import itertools
import os
import signal
from collections.abc import Mapping
from typing import Any

from recording import chains
from support import bucket_writer, KeyValues


def hasten() -> None:
    """Let a lease of a dead writer lapse at once."""
    bucket_writer.INTERVAL, bucket_writer.LAPSED_AFTER = 0.05, 0.5
    bucket_writer._POLL = 0.1


def sample(
    names: Mapping[str, str], url: str, blocks: int, dies_at: int = 0
) -> dict[str, Any]:
    """As `chains.sample`; the process is killed once it has asked for so many writes.

    The requests that are under way then may arrive, or not.
    """
    os.environ.update(names)
    hasten()
    numbers, writing = itertools.count(1), KeyValues.writing

    def asked(self: KeyValues, key: str, *args: Any, **how: Any) -> Any:
        future = writing(self, key, *args, **how)
        # The thread of the lease asks at any time.
        if key != "writer.lock" and next(numbers) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return future

    KeyValues.writing = asked
    return chains.sample(url, blocks)
