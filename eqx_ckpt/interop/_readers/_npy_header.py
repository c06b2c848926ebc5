"""The header of an `.npy` file, without NumPy's parser, which evaluates Python."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


_MAGIC = b"\x93NUMPY"


# NumPy's own limit, unless it is told otherwise.
_MAX_HEADER = 10_000


_FIELDS = re.compile(
    r"\{'descr': '(?P<descr>[<>|=]?\w{1,20}(\[\w{1,10}\])?)', *"
    r"'fortran_order': (?P<order>True|False), *"
    r"'shape': \((?P<shape>[0-9, ]*)\),? *\}[ \n]*"
)


# A list of fields, and dtypes that NumPy would unpickle.
_STRUCTURED = re.compile(r"\{'descr': \[")


_MAX_RANK = 64


class Npy(NamedTuple):
    """A parsed header; `nbytes` of data follow `header_nbytes`.

    `descr` is as NumPy writes it, such as `"<f4"`; a bfloat16 is `"<V2"`.
    """

    descr: str
    fortran_order: bool
    shape: tuple[int, ...]
    header_nbytes: int

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.descr)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_pickled(self) -> bool:
        return self.dtype.hasobject

    @property
    def is_fortran(self) -> bool:
        """Whether the order matters."""
        return self.fortran_order and len(self.shape) > 1

    @property
    def is_big_endian(self) -> bool:
        return not self.dtype.isnative


def read_npy(read: Callable[[int], bytes]) -> Npy:
    """Parse a header; `read(n)` gives the next `n` bytes.

    `ValueError` if it is not one, and `NotImplementedError` for arrays with fields.
    """
    magic = read(8)
    if len(magic) < 8 or magic[:6] != _MAGIC:
        raise ValueError(f"{magic[:6]!r} does not begin an `.npy` file")
    if magic[6] not in (1, 2, 3):
        raise ValueError(f"{magic[6]} is not a version of `.npy` files")
    width = 2 if magic[6] == 1 else 4
    length = int.from_bytes(read(width), "little")
    if length > _MAX_HEADER:
        raise ValueError(f"its header has {length} bytes")
    text = read(length).decode("latin1" if magic[6] < 3 else "utf8")
    if _STRUCTURED.match(text):
        raise NotImplementedError("an array with named fields")
    fields = _FIELDS.fullmatch(text)
    if fields is None:
        raise ValueError(f"its header is {text[:200]!r}")
    sizes = [size for size in fields["shape"].replace(" ", "").split(",") if size]
    shape = tuple(int(size[:20]) for size in sizes)
    try:
        npy = Npy(fields["descr"], fields["order"] == "True", shape, 8 + width + length)
        nbytes = npy.nbytes if len(shape) <= _MAX_RANK else 2**63
    except (TypeError, SyntaxError) as e:
        raise ValueError(f"its header is {text[:200]!r} ({e})") from None
    if nbytes >= 2**62 or max(shape, default=0) >= 2**62:
        raise ValueError(f"its header is {text[:200]!r}, which is too large")
    return npy
