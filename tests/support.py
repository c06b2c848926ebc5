"""The private parts of the package that tests of other rooms use, named only here.

Where things are (`locate`, `store_at`), the clocks and sizes that decide (`heartbeat`,
`chunk_grid`), and what can be made slow, or to fail.
"""

from typing import Any

from eqx_ckpt._distributed import jax_service
from eqx_ckpt._format import chunk_grid
from eqx_ckpt._storage.bucket import bucket_attempt, bucket_steps, heartbeat
from eqx_ckpt._storage.bucket.keyvalue_place import KeyValues
from eqx_ckpt._storage.calls import tensorstore_calls
from eqx_ckpt._storage.calls.posix_calls import exchange
from eqx_ckpt._storage.chunks import chunk_files, chunk_values
from eqx_ckpt._storage.chunks.chunk_files import ChunkFiles
from eqx_ckpt._storage.directory.directory_place import Directory
from eqx_ckpt._storage.directory.directory_steps import DirectorySteps
from eqx_ckpt._storage.locate import locate


__all__ = [
    "bucket_attempt",
    "bucket_steps",
    "chunk_files",
    "chunk_grid",
    "chunk_values",
    "ChunkFiles",
    "Directory",
    "DirectorySteps",
    "exchange",
    "heartbeat",
    "jax_service",
    "KeyValues",
    "locate",
    "store_at",
    "tensorstore_calls",
]


def store_at(url: str) -> Any:
    """The objects at a URL, as TensorStore sees them."""
    return tensorstore_calls.open_kvstore(locate(url).spec)
