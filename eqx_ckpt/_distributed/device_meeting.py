"""A meeting by the devices, for a JAX without a coordination service that is known."""

from collections.abc import Callable
from typing import Any

import jax

from .call_matching import out_of_order
from .jax_service import gather_on_devices
from .process_errors import from_json, to_json


def meet_on_devices(
    first: int, text: str, value: Any, make: Callable[[list[Any]], Any]
) -> Any:
    """Combine the messages of all processes on the first one; return the result."""
    said = gather_on_devices([text, value])
    if len({text for text, _ in said}) > 1:
        calls = {i: text for i, (text, _) in enumerate(said)}
        raise from_json(None, out_of_order(calls))
    answer = error = None
    if jax.process_index() == first:
        try:
            answer = {"value": make([value for _, value in said])}
        except BaseException as e:
            error, answer = e, {"error": to_json(e)}
    answer = gather_on_devices(answer)[first]
    if error is not None:
        raise error
    if "error" in answer:
        raise from_json(first, answer["error"])
    return answer["value"]
