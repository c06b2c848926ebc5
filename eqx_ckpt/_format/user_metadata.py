"""The user's metadata as JSON, which must hold each value exactly."""

import json
import math
from collections.abc import Iterator
from typing import Any

from .._errors import CheckpointError
from .._lazy import jax, jnp, np


MAX_METADATA_BYTES = 16 * 2**20


MAX_DEPTH = 64


# Each takes two bytes of JSON, with a comma; what is in several lists, once in each.
_MAX_VALUES = MAX_METADATA_BYTES // 2


# Python neither writes nor reads more than 4300 decimal digits.
_MAX_INT_BITS = 14_000


def exactly(metadata: Any, name: str = "metadata") -> Any:
    """Copy metadata to values that JSON returns exactly; array scalars become numbers.

    Raise `CheckpointError` for a value that JSON would change. `name` is that of the
    argument.
    """
    found = _plain(metadata, name, MAX_DEPTH, iter(range(_MAX_VALUES)))
    text = json.dumps(pack(found), allow_nan=False)
    if len(text) > MAX_METADATA_BYTES:
        raise _refused(name, f"has {len(text)} bytes as JSON; 16 MiB are allowed")
    if not is_same(unpack(json.loads(text)), found):
        raise _refused(name, "has strings with halves of surrogate pairs")
    return found


def _plain(value: Any, where: str, levels: int, room: Iterator[int]) -> Any:
    """Copy a value; each value in it takes one of `room`."""
    if next(room, None) is None:
        argument = where.partition("[")[0]
        raise _refused(argument, f"has more than {_MAX_VALUES:,} values")
    if value is None or type(value) in (bool, str, float):
        return value
    if type(value) is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise _refused(where, "has more than 4,000 digits")
        return value
    if type(value) in (dict, list) and not levels:
        raise _refused(where, f"is deeper than {MAX_DEPTH} levels")
    if type(value) is list:
        return [
            _plain(v, f"{where}[{i}]", levels - 1, room) for i, v in enumerate(value)
        ]
    if type(value) is dict:
        for key in value:
            if type(key) is not str or key == "@float":
                problem = "is reserved" if key == "@float" else "is not a string"
                raise _refused(where, f"has the key {key!r}, which {problem}")
        return {
            k: _plain(v, f"{where}[{k!r}]", levels - 1, room) for k, v in value.items()
        }
    return _number(value, where)


def _number(value: Any, where: str) -> bool | int | float:
    """The Python number equal to a NumPy or JAX scalar."""
    problem = f"is a `{type(value).__name__}`"
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        problem += f" of dtype {value.dtype} and shape {value.shape}"
        is_number = not isinstance(value, jax.core.Tracer) and value.shape == ()
        if is_number and jnp.issubdtype(value.dtype, jnp.bool):
            return bool(value)
        if is_number and jnp.issubdtype(value.dtype, jnp.integer):
            return int(value)
        if is_number and jnp.issubdtype(value.dtype, jnp.floating):
            number = float(value)
            if value.dtype.itemsize <= 8 or number == value or number != number:
                return number
    raise _refused(where, problem)


def _refused(where: str, problem: str) -> CheckpointError:
    argument = where.partition("[")[0]
    return CheckpointError(
        f"`{argument}` cannot be saved exactly: `{where}` {problem}. It has to be made "
        "of dictionaries with string keys, lists, strings, numbers, bools and `None`: "
        "write `list(...)` of a tuple, `str(...)` of a path, and save arrays as leaves."
    )


def pack(value: Any) -> Any:
    """Encode NaN and infinities, which JSON lacks but a diverged loss has."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"@float": repr(value)}
    if type(value) is dict:
        return {k: pack(v) for k, v in value.items()}
    if type(value) is list:
        return [pack(v) for v in value]
    return value


def unpack(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"@float"}:
            return float(value["@float"])
        return {k: unpack(v) for k, v in value.items()}
    if isinstance(value, list):
        return [unpack(v) for v in value]
    return value


def is_same(a: Any, b: Any) -> bool:
    """Whether two values of metadata are equal; a NaN is equal to a NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(is_same, a, b))
    return a == b or a != a


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0
