"""What all exports share: the order of leaves, and what formats cannot hold."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..._errors import CheckpointError, warn
from ..._format.leaf_names import encode
from ..._format.leaf_record import LeafRecord, plain_dtype, SCALAR_KINDS
from ..._format.manifest import Manifest
from ..._format.source import RegionRead, Source
from ..._inspecting.inspect_checkpoint import iter_leaves
from ..._sources.checkpoint_source import opened
from ..._tree.leaves.transient import note_in
from ..._types import check_flag, PathLike, Report
from .._readers._foreign_records import clashes, is_unicode, read_as, Unreadable


_MOST_SHOWN = 20


def plain(record: LeafRecord, value: Any) -> np.ndarray:
    """A leaf as a plain array, in C order."""
    return np.asarray(value, plain_dtype(record), order="C")


def raw(array: np.ndarray) -> memoryview:
    """The bytes of an array of any dtype."""
    return array.reshape(-1).view(np.uint8).data


def key_texts(record: LeafRecord) -> list[str]:
    """The keys of a leaf, as text."""
    return [str(key) for _, key in record.path]


class Form(NamedTuple):
    """What a format has in place of names and integers.

    **Attributes:**

    - `words`: what to call it, such as `"an npz file"`.
    - `separators`: those of its source's manifest; `None` if it has names as they are,
        or none at all.
    - `integers`: those that it has, if not all.
    - `keeps_settings`: whether it has those of the loaders that cursors are of.
    """

    words: str
    separators: str | None = None
    integers: range | None = None
    keeps_settings: bool = False

    def problem(self, record: LeafRecord) -> str | None:
        """Why it cannot hold a leaf of these keys, or of this value, if so."""
        if self.separators is not None and not is_unicode(*key_texts(record)):
            return "a key that is not Unicode"
        if self.integers is None or record.kind != "int":
            return None
        value = int(record.value or "", 0)
        is_held = value in self.integers
        return None if is_held else "an integer that does not fit into its 64 bits"

    def lost_names(self, manifest: Manifest) -> dict[str, str]:
        """The names of leaves with which this package would not open the file."""
        if self.separators is None:
            return {}
        read = {
            name: encode(read_as(record.path, self.separators))
            for name, record in manifest.leaves.items()
        }
        return {
            name: f"its name: as {read[name]!r} it clashes with {read[other]!r}, which "
            f"is of {other!r}, so that this package does not open the file again"
            for a, b in clashes(read.items())
            for name, other in ((a, b), (b, a))
        }


INT64 = range(-(2**63), 2**63)


# Those of `int64`, and of `uint64`.
INTEGERS = range(-(2**63), 2**64)


def losses(
    record: LeafRecord,
    *,
    keeps_numbers: bool,
    keeps_numpy: bool,
    keeps_byte_order: bool = False,
) -> list[str]:
    """What is lost when a leaf becomes a plain array."""
    found: list[str] = []
    if record.kind == "key":
        found.append(f"that it is a PRNG key of {record.impl!r}")
    if record.kind in SCALAR_KINDS and not keeps_numbers:
        found.append("that it is a Python number")
    if record.kind in ("numpy", "numpy_scalar") and not keeps_numpy:
        found.append("that it is NumPy's")
    if record.kind == "bytes":
        found.append("that a `filter_spec` wrote it")
    if record.dtype.startswith(">") and not keeps_byte_order:
        found.append("its byte order")
    if record.weak_type:
        found.append("its weak type")
    if record.sharding is not None:
        found.append("its sharding")
    return found


def check_leaves(
    manifest: Manifest,
    form: Form,
    problem_of: Callable[[str, LeafRecord], str | None] = lambda name, record: None,
    losses_of: Callable[[LeafRecord], list[str]] = lambda record: [],
    *,
    strict: bool,
    loses_metadata: bool = True,
) -> None:
    """Raise for leaves that a format cannot hold; warn of what it loses of others.

    That includes what the source could not read. With `strict`, raise for losses too.
    """
    check_flag("strict", strict)
    problems = {
        name: problem
        for name, record in manifest.leaves.items()
        if (problem := form.problem(record) or problem_of(name, record))
    }
    if problems:
        raise CheckpointError(
            f"Nothing was written, because {form.words} cannot hold these leaves:\n"
            + _lines(problems)
        )
    names = form.lost_names(manifest)
    lost = {
        name: ", ".join(found)
        for name, record in manifest.leaves.items()
        if (found := ([names[name]] if name in names else []) + losses_of(record))
    }
    for name, note in manifest.unsaved.items():
        if isinstance(note, Unreadable):
            lost[name] = f"all of it: {note}"
        elif not form.keeps_settings and (settings := note_in(note)) is not None:
            lost[name] = f"the settings of its loader: {settings}"
    if loses_metadata and manifest.metadata is not None:
        lost["@metadata"] = "all of it"
    if not lost:
        return
    if strict:
        raise CheckpointError(
            f"Nothing was written, because {form.words} would lose:\n{_lines(lost)}\n"
            "Pass `strict=False` to write it all the same."
        )
    words = form.words[0].upper() + form.words[1:]
    warn(f"{words} does not keep:\n{_lines(lost)}")


def _lines(found: dict[str, str]) -> str:
    lines = [f"- of {name!r}, {text}." for name, text in found.items()]
    more = len(lines) - _MOST_SHOWN
    return "\n".join(
        lines[:_MOST_SHOWN] + ([f"- And of {more} more leaves."] if more > 0 else [])
    )


def in_order(
    source: PathLike | Source, names: Sequence[str]
) -> Iterator[tuple[str, LeafRecord, Any]]:
    """The leaves of these names, one by one in this order, as from `iter_leaves`."""
    return iter_leaves(_Chosen(opened(source), names))


class _Chosen(Source):
    """Some leaves of a source, in another order."""

    def __init__(self, source: Source, names: Sequence[str]) -> None:
        self._source = source
        records = source.manifest.leaves
        chosen = {name: records[name] for name in names}
        self._manifest = replace(source.manifest, leaves=chosen)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def has_changed(self) -> bool:
        return self._source.has_changed()

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[np.ndarray]:
        return self._source.read(reads, damage, report)

    def __str__(self) -> str:
        return str(self._source)
