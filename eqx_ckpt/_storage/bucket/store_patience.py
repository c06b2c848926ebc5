"""How long to wait for a store.

A large object over a slow connection takes long; a store that has died must not block
the program. TensorStore does not distinguish the two: it gives up a request after 90
seconds, and a save makes many. So a store that answers no request is sent a small one.
If it does not answer that either, the operation fails.
"""

import logging
import math
import time
from typing import Any

from ..calls.send_window import line_of
from ..calls.tensorstore_calls import context, KvSpec, resolved, wait_for


logger = logging.getLogger("eqx_ckpt")


# Seconds: without an answer to any request, until the store is asked whether it is
# there; and for that.
PROBE_AFTER = 20.0


LAST_PATIENCE = 10.0


_RETRIES = {"max_retries": 3, "initial_delay": "500ms", "max_delay": "2s"}


# Stores that did not answer the last probe. Before the next request, such as one that
# cleans up, they are probed again.
_silent: set[tuple[object, ...]] = set()


# When each store last answered a request.
_last_answer: dict[tuple[object, ...], float] = {}


def wait_patiently(
    store: KvSpec, future: Any, where: str, most: float | None = None
) -> Any:
    """Wait for a request as long as the store answers others.

    `where` describes the request. After `most` seconds it fails in any case.
    """
    place = line_of(store)
    waited = 0.0
    try:
        if place in _silent:
            _ask(store, place, where)
        while not _has_come(future, PROBE_AFTER):
            waited += PROBE_AFTER
            if most is not None and waited >= most:
                raise TimeoutError(f"Not done within {most:g} seconds ({where}).")
            # A small request may have to wait behind the large ones.
            if time.monotonic() - _last_answer.get(place, -math.inf) > PROBE_AFTER:
                _ask(store, place, where)
    except BaseException:
        future.cancel()  # Not to be repeated: its caller has given up.
        raise
    found = wait_for(future, where)
    _last_answer[place] = time.monotonic()
    return found


def _has_come(future: Any, seconds: float) -> bool:
    try:
        future.exception(timeout=seconds)
    except TimeoutError:
        return False
    return True


def _ask(store: KvSpec, place: tuple[object, ...], where: str) -> None:
    """Raise if the store does not answer at all."""
    import tensorstore as ts

    own = ts.Context(
        # The probe has a queue of its own: in the other one, it may have to wait for
        # large objects.
        {
            "s3_request_concurrency": {"limit": 4},
            "gcs_request_concurrency": {"limit": 4},
            "s3_request_retries": _RETRIES,
            "gcs_request_retries": _RETRIES,
            "http_request_retries": _RETRIES,
        },
        context(),
    )
    asking = wait_for(ts.KvStore.open(resolved(store), context=own), where).read("@")
    try:
        wait_for(asking, where, LAST_PATIENCE)
    except (ConnectionError, TimeoutError):
        _silent.add(place)
        raise
    except Exception as e:
        logger.debug("The store of %s has answered: %s", where, e)
    finally:
        asking.cancel()
    _silent.discard(place)
