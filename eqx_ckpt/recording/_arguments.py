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


def as_index(argument: str, value: Any) -> int:
    """An integer, of Python, NumPy or JAX; the error names the argument."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"`{argument}` is {value!r}. Pass an integer.")
