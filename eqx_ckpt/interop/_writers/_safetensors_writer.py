"""Writing files of safetensors."""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..._errors import CheckpointError
from ..._format.leaf_record import LeafRecord, plain_dtype
from ..._format.manifest import Manifest
from ..._format.source import Source
from ..._inspecting.inspect_checkpoint import iter_leaves
from ..._storage.calls.store_path import local_path
from ..._storage.directory.local_file import LocalFile
from ..._storage.interface.output_files import NewFiles
from ..._storage.interface.replacing import is_replacement, Kind, opened_by
from ..._tree.transform.transform_argument import Transform
from ..._types import check_optional_integer, PathLike
from .._readers._foreign_records import is_unicode
from .._readers._safetensors_reader import (
    DTYPES,
    INDEX,
    MAX_HEADER_BYTES,
    read_header,
    read_index,
    SEPARATORS,
)
from ._export_checks import check_leaves, Form, INT64, key_texts, losses, plain, raw
from ._transformed_source import transformed


_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


_ALIGNMENT = 8


def to_safetensors(
    source: PathLike | Source,
    path: PathLike,
    *,
    transform: Transform | None = None,
    max_shard_bytes: int | None = None,
    strict: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint, or any source, to a file of safetensors.

    The keys of each leaf are joined by `.`: what came in by
    [`eqx_ckpt.interop.open_safetensors`][] goes out under the same names. The leaves
    pass through memory one after another.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or an
        [`eqx_ckpt.interop.Source`][].
    - `path`: the file, such as `"model.safetensors"`.
    - `transform`: as [`eqx_ckpt.tree_deserialise_leaves`][]: what it returns is what is
        written, so the names are yours. Each leaf that it computes is computed by
        itself, when it is its turn.
    - `max_shard_bytes`: split it into files of at most so many bytes of tensors, or of
        one tensor: `"model-00001-of-00003.safetensors"`, with an index
        `"model.safetensors.index.json"`, as Hugging Face does.
    - `strict`: raise, instead of warning once, if something is lost: PRNG keys become
        their data, Python numbers and NumPy arrays become arrays like all others, and
        shardings, weak types, the settings of data loaders and metadata other than a
        dictionary of strings are left out. Or if
        [`eqx_ckpt.interop.open_safetensors`][] would not open the file, because the
        names of two leaves clash once they are split at `.`.
    - `overwrite`: replace existing files of safetensors. What was written to the
        same `path` in a different number of files is removed.

    **Returns:**

    What to open: the file, or the index.

    **Raises:**

    - [`eqx_ckpt.CheckpointError`][]: the format cannot hold a leaf, such as `int4` or
        `complex128`; nothing is written.
    - [`eqx_ckpt.CheckpointExistsError`][]: a file exists already.
    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - [`eqx_ckpt.LeafMismatchError`][]: `transform` cannot be used.

    !!! example

        ```python
        import eqx_ckpt
        import equinox as eqx
        import jax

        model = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0))
        eqx_ckpt.tree_serialise_leaves("ckpt", model)
        eqx_ckpt.interop.to_safetensors("ckpt", "model.safetensors")
        ```
    """
    most = check_optional_integer("max_shard_bytes", max_shard_bytes, 1)
    place = Path(local_path(path))
    is_replacement(str(place), _KIND, overwrite=overwrite)
    source = transformed(source, transform)
    manifest = source.manifest
    names = _names(manifest)
    metadata = manifest.metadata if _is_strings(manifest.metadata) else None
    check_leaves(
        manifest,
        Form("a safetensors file", SEPARATORS, INT64),
        _problem,
        lambda record: losses(record, keeps_numbers=False, keeps_numpy=False),
        strict=strict,
        loses_metadata=metadata is None,
    )
    shards = _shards(manifest, most)
    paths = [place]
    if len(shards) > 1:
        end = f"-of-{len(shards):05}{place.suffix}"
        numbered = [f"{place.stem}-{i + 1:05}{end}" for i in range(len(shards))]
        paths = [place.with_name(name) for name in numbered]
        paths.append(place.with_name(place.name + INDEX))
    stale = [str(file) for file in _written_before(place) if file not in paths]
    with NewFiles(paths, _KIND, overwrite=overwrite, replaces=stale) as new:
        values = iter_leaves(source)
        for shard in shards:
            with new.next() as f:
                _write(
                    f, {names[n]: manifest.leaves[n] for n in shard}, metadata, values
                )
        if len(shards) > 1:
            with new.next() as f:
                f.write(_index(shards, names, paths, manifest))
    return Path(new.paths[-1])


def _read(path: str) -> None:
    if path.endswith(INDEX):
        read_index(LocalFile(path))
    else:
        read_header(LocalFile(path))


_KIND = Kind("a safetensors file", opened_by(_read))


def _is_strings(metadata: Any) -> bool:
    return isinstance(metadata, dict) and all(
        isinstance(text, str) and is_unicode(text)
        for pair in metadata.items()
        for text in pair
    )


def _names(manifest: Manifest) -> dict[str, str]:
    """What each leaf is called in the file."""
    names = {
        name: ".".join(key_texts(record)) for name, record in manifest.leaves.items()
    }
    first: dict[str, str] = {"__metadata__": "the metadata"}
    for name, text in names.items():
        if first.setdefault(text, name) != name:
            raise CheckpointError(
                f"Nothing was written: {first[text]!r} and {name!r} would both be "
                f"{text!r}."
            )
    return names


def _problem(_: str, record: LeafRecord) -> str | None:
    if plain_dtype(record) not in _TAGS:
        return f"the dtype `{plain_dtype(record)}`"
    return None


def _nbytes(record: LeafRecord) -> int:
    return plain_dtype(record).itemsize * int(np.prod(record.data_shape, dtype=object))


def _shards(manifest: Manifest, most: int | None) -> list[list[str]]:
    """Which leaves are in which file, in their order."""
    shards: list[list[str]] = [[]]
    total = 0
    for name, record in manifest.leaves.items():
        total += _nbytes(record)
        if most is not None and total > most and shards[-1]:
            shards.append([])
            total = _nbytes(record)
        shards[-1].append(name)
    return shards


def _written_before(place: Path) -> list[Path]:
    """The files of an earlier export to the same path, in one file or in several."""
    index = place.with_name(place.name + INDEX)
    shards: set[str] = set()
    # There is none, or it is not valid.
    with contextlib.suppress(CheckpointError):
        shards.update(read_index(LocalFile(index))[0].values())
    numbered = re.compile(
        rf"{re.escape(place.stem)}-\d{{5}}-of-\d{{5}}{re.escape(place.suffix)}"
    )
    names = [place.name, index.name, *sorted(filter(numbered.fullmatch, shards))]
    files = [place.with_name(name) for name in names]
    return [file for file in files if os.path.lexists(file)]


def _write(
    f: BinaryIO,
    records: Mapping[str, LeafRecord],
    metadata: dict[str, str] | None,
    values: Iterator[tuple[str, LeafRecord, Any]],
) -> None:
    # The widest come first, so that all of them are aligned.
    in_order = sorted(records, key=lambda text: -plain_dtype(records[text]).itemsize)
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offsets: dict[str, int] = {}
    end = 0
    for text in in_order:
        record = records[text]
        offsets[text], end = end, end + _nbytes(record)
        header[text] = {
            "dtype": _TAGS[plain_dtype(record)],
            "shape": record.data_shape,
            "data_offsets": [offsets[text], end],
        }
    data = json.dumps(header, ensure_ascii=False).encode()
    data += b" " * (-len(data) % _ALIGNMENT)
    if len(data) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"Nothing was written: the header would have {len(data)} bytes, and "
            f"readers take {MAX_HEADER_BYTES}. Split it with `max_shard_bytes`."
        )
    f.write(len(data).to_bytes(8, "little") + data)
    for text in records:
        f.seek(8 + len(data) + offsets[text])
        # Without a name here, which would keep it while the next one is read.
        f.write(raw(plain(*next(values)[1:])))


def _index(
    shards: list[list[str]],
    names: Mapping[str, str],
    paths: list[Path],
    manifest: Manifest,
) -> bytes:
    weight_map = {
        names[name]: path.name
        for shard, path in zip(shards, paths, strict=False)
        for name in shard
    }
    metadata = {"total_size": sum(map(_nbytes, manifest.leaves.values()))}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()
