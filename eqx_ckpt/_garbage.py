"""Let Python's garbage collector wait while many objects are made that stay."""

import contextlib
import gc
from collections.abc import Generator


@contextlib.contextmanager
def no_collections() -> Generator[None]:
    """Let the garbage collector wait, for all threads, until the end of the block.

    It begins again and again as objects are made, and visits all that were made before:
    of 100,000 leaves, that takes longer than everything else of a plan.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
