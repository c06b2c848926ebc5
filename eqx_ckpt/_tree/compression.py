"""Which leaves are compressed; by default, none."""

from collections.abc import Callable
from typing import Literal, TypeAlias

from .._errors import CheckpointError
from .._format.leaves import LeafRecord
from .._format.manifest import COMPRESSIONS
from .plan import Write


Codec: TypeAlias = Literal["zstd"] | None
Compression: TypeAlias = Codec | Callable[[str, LeafRecord], Codec]
"""`"zstd"`, `None`, or a function `(name, record)` that returns one of them."""


def check_compression(compression: Compression) -> None:
    if not callable(compression) and compression not in (None, *COMPRESSIONS):
        raise CheckpointError(
            f"`compression` is {compression!r}. Pass 'zstd', `None`, or a function "
            "`(name, record)` that returns one of them."
        )


def compressed(writes: list[Write], compression: Compression) -> list[Write]:
    """The writes, with the compression of each leaf in its record."""
    check_compression(compression)
    found: list[Write] = []
    problems: list[str] = []
    for write in writes:
        if write.leaf is not None:
            name, record = write.name, write.record
            codec = compression(name, record) if callable(compression) else compression
            if codec not in (None, *COMPRESSIONS):
                problems.append(f"- {name!r}: {codec!r}.")
            write = write._replace(record=record._replace(compression=codec))
        found.append(write)
    if problems:
        raise CheckpointError(
            "These leaves cannot be compressed so:\n"
            + "\n".join(problems)
            + "\nPass `'zstd'`, `None`, or a function `(name, record)` that returns "
            "one of them."
        )
    return found
