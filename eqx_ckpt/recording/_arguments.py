"""Validate arguments."""

import operator
from typing import Any


def check_positive(argument: str, value: Any) -> int:
    """Validate a positive integer; the error names the argument."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 1:
        raise ValueError(f"`{argument}` is {value!r}. Pass a positive integer.")
    return number
