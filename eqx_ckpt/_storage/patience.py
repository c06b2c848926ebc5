"""How long a store is waited for.

A large object on a slow way takes its time, and a store that has died must not take
ours. TensorStore does not tell the two apart: it gives a request up after a minute and
a half, and there are many requests in a save. So a store that lets us wait is asked for
something small. If it does not answer that either, the operation has ended.
"""

import logging
from typing import Any

from .kvstore import context, KvSpec, result, url


logger = logging.getLogger("eqx_ckpt")

# Seconds: for a request, until the store is asked whether it is there; and for that.
PATIENCE = 20.0
LAST_PATIENCE = 10.0
_RETRIES = {"max_retries": 3, "initial_delay": "500ms", "max_delay": "2s"}
# Those that were not there when they were asked last. Whoever cleans up after that, or
# begins something else, asks first.
_silent: set[tuple[object, ...]] = set()


def answer(base: KvSpec, future: Any, key: str = "", most: float | None = None) -> Any:
    """What a request comes to, however long that takes a store that answers others.

    After `most` seconds it has failed anyhow.
    """
    store, where = base, url(base, key)
    while store["driver"] == "ocdbt":
        store = store["base"]
    if store["driver"] not in ("s3", "gcs"):
        return result(future, where, most)
    place = (store["driver"], store.get("endpoint"), store["bucket"])
    waited = 0.0
    try:
        if place in _silent:
            _ask(store, place)
        while not _has_come(future, PATIENCE):
            waited += PATIENCE
            if most is not None and waited >= most:
                raise TimeoutError(f"Not done within {most:g} seconds ({where}).")
            _ask(store, place)
    except BaseException:
        future.cancel()  # Nobody is to try again when its caller has given up.
        raise
    return result(future, where)


def _has_come(future: Any, seconds: float) -> bool:
    try:
        future.exception(timeout=seconds)
    except TimeoutError:
        return False
    return True


def _ask(store: KvSpec, place: tuple[object, ...]) -> None:
    """Raise if the store answers nothing at all."""
    import tensorstore as ts

    own = ts.Context(
        # Its own queue: in the other one, large objects may be before it.
        {
            "s3_request_concurrency": {"limit": 4},
            "gcs_request_concurrency": {"limit": 4},
            "s3_request_retries": _RETRIES,
            "gcs_request_retries": _RETRIES,
        },
        context(),
    )
    asking = result(ts.KvStore.open(store, context=own), store["driver"]).read("@")
    try:
        result(asking, url(store), LAST_PATIENCE)
    except (ConnectionError, TimeoutError):
        _silent.add(place)
        raise
    except Exception as e:
        logger.debug("%s has answered: %s", url(store), e)
    finally:
        asking.cancel()
    _silent.discard(place)
