"""The record of a recording: a small file; replacing it is the commit."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .._errors import CheckpointError, CorruptCheckpointError
from .dtype_names import DATA_TYPES
from .leaf_names import check_path, inside_others
from .leaf_record import CannotSave, CRC32C_DIGITS, LeafRecord
from .manifest import check_array, excess
from .user_metadata import depth, MAX_DEPTH, pack, unpack


RECORD = "recording.json"


# The folder of the arrays, below the recording.
FOLDER = "samples"


STATES = "states"


_FORMAT = "eqx_ckpt recording"


_VERSION = 1


_MAX = 2**53


_MAX_CHUNKS = 2**24


_MAX_CHAINS = 2**20


_HEX = re.compile(r"[0-9a-f]*\Z")


_NO_DIGEST = "0" * 64


# What parsing raises for invalid contents.
_INVALID = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class Leaf(NamedTuple):
    """A leaf of one sample.

    The chains whose samples are in the same chunks are a band.

    **Attributes:**

    - `name`: the name of its Zarr array.
    - `record`: its record in one sample of one chain, without chunks.
    - `chains`, `rows`: the numbers of chains and of draws in a chunk.
    """

    name: str
    record: LeafRecord
    chains: int
    rows: int

    @property
    def row_bytes(self) -> int:
        """The bytes of one sample of one chain."""
        return math.prod(self.record.data_shape) * self.record.itemsize

    def chunks(self, draws: int) -> int:
        """The number of chunks of a band whose longest chain has so many draws."""
        return -(-draws // self.rows) if self.row_bytes else 0

    def bands(self, chains: int | None) -> list[range]:
        """The chains of each band, of so many chains."""
        count = chains or 1
        return [
            range(start, min(start + self.chains, count))
            for start in range(0, count, self.chains)
        ]

    def array(self, chains: int | None, draws: int) -> LeafRecord:
        """The record of the Zarr array that holds `draws` samples of each chain."""
        lead = (draws,) if chains is None else (chains, draws)
        chunk = (self.rows,) if chains is None else (self.chains, self.rows)
        shape = self.record.data_shape
        return self.record._replace(
            shape=(*lead, *self.record.shape),
            data_shape=(*lead, *shape),
            chunk_shape=(*chunk, *(max(1, size) for size in shape)),
        )

    def chunk_at(self, chains: int | None, band: int, number: int) -> tuple[int, ...]:
        """The index in the array's chunk grid of a chunk of one band."""
        lead = (number,) if chains is None else (band, number)
        return (*lead, *(0 for _ in self.record.data_shape))


def dimension_names(leaf: Leaf, chains: int | None) -> list[str]:
    """Dimension names as ArviZ has them: `("chain", "draw", "theta_dim_0")`."""
    name = leaf.name.rpartition("/")[2]
    own = [f"{name}_dim_{i}" for i in range(len(leaf.record.data_shape))]
    return ["draw", *own] if chains is None else ["chain", "draw", *own]


def state_folder(number: int) -> str:
    """The folder of a state, below the recording."""
    return f"{STATES}/{number:06d}/"


@dataclass(frozen=True)
class Record:
    """The committed part of a recording.

    **Attributes:**

    - `leaves`, `chains`, `metadata`: those that the recording was made with.
    - `commit`: the number of commits.
    - `draws`: the number of samples of each chain.
    - `state`: the number of the checkpoint with the state that follows the samples, or
        `None`.
    - `steps`: the number of steps that `record_scan` has taken.
    - `writer`: a random text for each process that opened the recording to write.
    - `checksums`: for each leaf and band, the crc32c at the end of each chunk's file;
        for a chunk that is not full, the crc32c of its samples, chain by chain.
    """

    leaves: tuple[Leaf, ...]
    chains: int | None
    metadata: Any
    draws: tuple[int, ...]
    commit: int = 0
    state: int | None = None
    steps: int = 0
    writer: str = ""
    checksums: Mapping[str, tuple[str, ...]] | None = None

    @property
    def is_committed(self) -> bool:
        return self.commit > 0

    def most(self, band: range) -> int:
        """The number of draws of the longest chain of a band."""
        return max(self.draws[band.start : band.stop])

    def checksums_of(self, leaf: Leaf, band: int) -> list[str]:
        """The checksums of the chunks of a band."""
        text = (self.checksums or {}).get(leaf.name, {band: ""})[band]
        starts = range(0, len(text), CRC32C_DIGITS)
        return [text[i : i + CRC32C_DIGITS] for i in starts]

    def to_commit(self) -> bytes:
        """The bytes to commit; raise `CheckpointError` if readers would refuse them."""
        data = self.to_bytes()
        try:
            _parsed(json.loads(data))
        except (*_INVALID, CannotSave) as e:
            raise CheckpointError(
                f"Readers would refuse the record, so it was not committed: {e!r}"
            ) from e
        return data

    def to_bytes(self) -> bytes:
        fields = {
            "format": _FORMAT,
            "version": _VERSION,
            "digest": _NO_DIGEST,
            "chains": self.chains,
            "commit": self.commit,
            "draws": self.draws[0] if len({*self.draws}) == 1 else self.draws,
            "state": self.state,
            "steps": self.steps,
            "writer": self.writer,
            "metadata": None if self.metadata is None else pack(self.metadata),
            "leaves": {leaf.name: _leaf_to_json(leaf) for leaf in self.leaves},
            "checksums": self.checksums or {},
        }
        lines = [
            f'"{key}": {json.dumps(value, allow_nan=False)}'
            for key, value in fields.items()
        ]
        data = ("{" + ",\n".join(lines) + "}\n").encode()
        digest = hashlib.sha256(data).hexdigest()
        return data.replace(_NO_DIGEST.encode(), digest.encode(), 1)


def _leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    record = leaf.record
    return {
        "kind": record.kind,
        "dtype": record.dtype,
        "shape": record.shape,
        "impl": record.impl,
        "data_shape": record.data_shape,
        "compression": record.compression,
        "path": record.path,
        "chunk": [leaf.chains, leaf.rows],
    }


def from_bytes(data: bytes, where: str) -> Record:
    """Read a record, which is untrusted input; `where` names it in errors."""
    if problem := excess(data):
        raise _corrupt(where, problem)
    try:
        fields = json.loads(data)
        is_ours = fields["format"] == _FORMAT
        version = fields["version"]
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise _corrupt(where, f"it cannot be read ({e!r})") from None
    if not is_ours:
        raise _corrupt(where, "it is of a different format")
    if version != _VERSION:
        raise CheckpointError(
            f"{where} is a recording of version {version!r}, and this package reads "
            f"version {_VERSION}. Use the package that wrote it, or a newer one."
        )
    digest = fields.get("digest")
    stated = f'"{digest}"'.encode(errors="surrogatepass")
    blank = data.replace(stated, f'"{_NO_DIGEST}"'.encode(), 1)
    if hashlib.sha256(blank).hexdigest() != digest:
        raise _corrupt(where, "its bytes do not have the digest that it states")
    try:
        return _parsed(fields)
    except _INVALID as e:
        raise _corrupt(where, f"its contents are invalid ({e!r})") from None
    except CannotSave as e:
        raise _corrupt(where, f"a leaf {e}") from None


def _corrupt(where: str, problem: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"The record of the recording {where} is damaged: {problem}. Restore "
        f"`{RECORD}` from a copy; the samples are Zarr arrays in `samples/`."
    )


def _parsed(fields: Any) -> Record:
    chains = fields["chains"]
    if chains is not None:
        _require(_number(chains, 1) <= _MAX_CHAINS, f"at most {_MAX_CHAINS} chains")
    draws = fields["draws"]
    if type(draws) is list:
        draws = tuple(_number(n) for n in draws)
    else:
        draws = (_number(draws),) * (chains or 1)
    _require(len(draws) == (chains or 1), "draws of other chains")
    state, metadata = fields["state"], unpack(fields["metadata"])
    _require(depth(metadata) <= MAX_DEPTH, "metadata of so few levels")
    _require(not any(inside_others(fields["leaves"])), "a leaf beside the others")
    leaves = tuple(_leaf(name, entry) for name, entry in fields["leaves"].items())
    for leaf in leaves:
        check_array(leaf.array(chains, max(draws)))
        _require(leaf.chains <= len(draws), "chunks of the chains")
        # Readers have a checksum of each in memory.
        most = len(leaf.bands(chains)) * leaf.chunks(max(draws))
        _require(most <= _MAX_CHUNKS, f"{most} chunks of a leaf that fit in memory")
    record = Record(
        leaves=leaves,
        chains=chains,
        metadata=metadata,
        draws=draws,
        commit=_number(fields["commit"]),
        state=None if state is None else _number(state),
        steps=_number(fields["steps"]),
        writer=str(fields["writer"]),
        checksums={
            leaf.name: _checksums(fields["checksums"].get(leaf.name), leaf, draws)
            for leaf in leaves
        },
    )
    _require(bool(leaves), "no leaves")
    return record


def _checksums(found: Any, leaf: Leaf, draws: tuple[int, ...]) -> tuple[str, ...]:
    bands = leaf.bands(len(draws))
    texts = tuple(found) if found is not None else ("",) * len(bands)
    _require(len(texts) == len(bands), "checksums of other chains")
    for text, band in zip(texts, bands, strict=True):
        count = leaf.chunks(max(draws[band.start : band.stop]))
        _require(len(text) == CRC32C_DIGITS * count and _HEX.match(text), "checksums")
    return texts


def _leaf(name: str, entry: Any) -> Leaf:
    path = tuple((kind, token) for kind, token in entry["path"])
    # Any other name would be unsafe as a directory.
    check_path(name, path)
    kind = entry["kind"]
    _require(kind in ("jax", "numpy", "key"), "a kind")
    record = LeafRecord(
        kind,
        entry["dtype"],
        tuple(entry["shape"]),
        impl=entry["impl"],
        data_type="uint32" if kind == "key" else DATA_TYPES[entry["dtype"]],
        data_shape=tuple(entry["data_shape"]),
        compression=entry["compression"],
        path=path,
    )
    of_chains, rows = (_number(size, 1) for size in entry["chunk"])
    return Leaf(name, record, of_chains, rows)


def _number(value: Any, least: int = 0) -> int:
    _require(type(value) is int and least <= value < _MAX, "a number")
    return value


def _require(condition: Any, what: str) -> None:
    if not condition:
        raise ValueError(f"not {what}")
