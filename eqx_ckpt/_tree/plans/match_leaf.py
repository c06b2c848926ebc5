"""A leaf of `like` beside the record of the same name."""

import warnings
from typing import Any

import numpy as np

from ..._format.leaf_record import (
    LeafRecord,
    scalar_from_text,
    SCALAR_KINDS,
    scalar_to_text,
)
from ..._types import Spec
from ..leaves.casting import becomes, cast_number, Casting, dtype_of, number
from ..leaves.leaf_kinds import describe_like, fingerprint
from ..matching.leaf_match import LeafMatch


def match_leaf(
    like: Any, spec: Spec | None, record: LeafRecord, casting: Casting
) -> tuple[LeafMatch, LeafRecord]:
    """A leaf of `like` beside its record, and what that becomes there.

    What a custom `filter_spec` makes of it is not known before it is read.
    """
    expected = describe_like(like)
    if spec is not None:
        return LeafMatch("custom", expected or fingerprint(like), record), record
    if expected is None:
        return LeafMatch("kind", fingerprint(like), record), record
    new = becomes(expected, record, casting)
    if isinstance(new, str):
        return LeafMatch(new, expected, record), record
    # First what most leaves are, as there may be 100,000.
    if new is record and record.value is None:
        return LeafMatch("same", expected, record), record
    has_number = record.value is not None or new.kind in SCALAR_KINDS
    if has_number and (problem := _not_a_number_for(like, expected, record, new)):
        return LeafMatch("kind", problem, record), record
    is_same = new is record or dtype_of(record) == dtype_of(new)
    status = "same" if is_same else "cast"
    if status == "same" and record.value is not None and expected.value is not None:
        status = "same" if expected.value == record.value else "value"
    return LeafMatch(status, expected, record), new


def _not_a_number_for(
    like: Any, expected: LeafRecord, record: LeafRecord, new: LeafRecord
) -> str:
    """Why a number, or what is to become one, cannot; nothing if it can."""
    if record.value is None:
        is_plain = type(like).__name__ == new.kind
        made = f"`{type(like).__name__}` (which is made from a Python number only)"
        return "" if is_plain else made
    try:
        # Whatever the cast warns of, it does so when it takes place.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            number_like(like, record, new)
    except ValueError as e:
        return str(e)
    except OverflowError:
        return f"{expected} (too small)"
    return ""


def number_like(like: Any, record: LeafRecord, new: LeafRecord) -> Any:
    """What a Python number of the checkpoint becomes; an array is on the host.

    A subclass, such as an `IntEnum`, is made again from it. `ValueError` if it cannot
    be, or would become a different number; `OverflowError` if it is too large.
    """
    value = scalar_from_text(record.kind, record.value or "")
    if new.kind not in SCALAR_KINDS:
        return cast_number(value, np.dtype(new.dtype))
    return of_type(like, value, new.kind)


def of_type(like: Any, value: Any, kind: str) -> Any:
    """A number as one of the same type as `like`."""
    value = value if type(value).__name__ == kind else number(value, kind)
    cls = type(like)
    if cls is type(value):
        return value
    try:
        made = cls(value)
        if scalar_to_text(made) == scalar_to_text(value):
            return made
        problem = f"it makes {made!r}"
    except Exception as e:
        problem = str(e)
    raise ValueError(f"`{cls.__name__}` (which {value!r} is not: {problem})")
