"""Types that several modules share."""

import numbers
import operator
import os
import re
from collections.abc import Callable, Collection
from typing import Any, get_args, Literal, TypeAlias


PathLike: TypeAlias = str | os.PathLike[str]


KeyPath: TypeAlias = tuple[Any, ...]


IsLeaf: TypeAlias = Callable[[Any], bool] | None


TypedPath: TypeAlias = tuple[tuple[str, str | int], ...]


Layout: TypeAlias = Literal["zarr", "ocdbt"]


"""How a checkpoint stores its arrays: as files, or in one database."""


LAYOUTS: tuple[Layout, ...] = get_args(Layout)


# Those in which a checkpoint can share chunks with another one.
SHARING_LAYOUTS: tuple[Layout, ...] = ("zarr",)


# What `interop` opens, by the function that does it, and what it converts to.
Format: TypeAlias = Literal[
    "checkpoint", "eqx", "flax", "jax_arrays", "npz", "orbax", "safetensors"
]


Target: TypeAlias = Literal["checkpoint", "eqx", "flax", "npz", "orbax", "safetensors"]


Spec: TypeAlias = Callable[[Any, Any], Any]


# Called with the name of a leaf, and the number of its bytes that have just been done.
Report: TypeAlias = Callable[[str, int], None]


# The `LeafRecord.checksums` of each leaf; "" if another process writes a chunk.
Checksums: TypeAlias = dict[str, list[str]]


def is_real(value: Any) -> bool:
    """Whether `value` is a real number; `True` is not."""
    return not isinstance(value, bool) and isinstance(value, numbers.Real)


# Of a wrong argument, in an error.
_MOST_TEXT = 80


def shown(value: Any, article: str = "a") -> str:
    """A wrong argument, for an error; of a long one, such as a PyTree, its type."""
    try:
        text = repr(value)
    except ValueError:  # Python does not write integers of more than 4300 digits.
        text = ""
    is_short = 0 < len(text) <= _MOST_TEXT and "\n" not in text
    return text if is_short else f"{article} `{type(value).__name__}`"


def as_text(path: Any) -> str:
    """The text of a path or URL; `TypeError` if it is neither."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        wanted = "a string, a `pathlib.Path`, or an `eqx_ckpt.StorePath`"
        raise no_path(path, wanted)
    return text


def no_path(value: Any, wanted: str) -> TypeError:
    return TypeError(f"{shown(value, 'A')} is not a path. Pass {wanted}.")


def wrong(value: Any, *kinds: type) -> type[TypeError | ValueError]:
    """The error for a wrong argument: its type or its value."""
    is_kind = isinstance(value, kinds) and not isinstance(value, bool)
    return ValueError if is_kind else TypeError


def check_word(argument: str, value: Any, words: Collection[str]) -> None:
    """Raise if an argument is none of some words; the error names the argument."""
    if not isinstance(value, str) or value not in words:
        known = ", ".join(map(repr, words))
        raise wrong(value, str)(f"`{argument}` is {shown(value)}. Pass one of {known}.")


def as_integer(value: Any) -> int | None:
    """An integer of Python, NumPy or JAX as an `int`; `None` if it is none."""
    # Older versions of NumPy take their own bools for integers.
    if isinstance(value, bool) or getattr(value, "dtype", None) == "bool":
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_integer(argument: str, value: Any, least: int | None = None) -> int:
    """Return an integer as an `int`; raise if it is none, or less than `least`."""
    number = as_integer(value)
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        kind = TypeError if number is None else ValueError
        raise kind(f"`{argument}` is {shown(value)}. Pass an integer{bound}.")
    return number


def check_optional_integer(argument: str, value: Any, least: int) -> int | None:
    """As `check_integer`, where `None` is allowed."""
    return None if value is None else check_integer(argument, value, least)


def check_kind(argument: str, value: Any, kind: type, wanted: str) -> None:
    """Raise if an argument is not of a type; the error names the argument."""
    is_flag = isinstance(value, bool) and kind is not bool
    if is_flag or not isinstance(value, kind):
        raise TypeError(f"`{argument}` is {shown(value)}. Pass {wanted}.")


def check_flag(argument: str, value: Any) -> None:
    check_kind(argument, value, bool, "`True` or `False`")


def check_text(argument: str, value: Any) -> None:
    check_kind(argument, value, str, "a string")


def check_digest(argument: str, value: Any) -> None:
    """Raise if an argument is not a SHA-256 as this package writes it."""
    check_text(argument, value)
    if not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(
            f"`{argument}` is {shown(value)}. Pass 64 hexadecimal digits in lower case."
        )


def check_function(argument: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"`{argument}` is {shown(value)}. Pass a function.")
