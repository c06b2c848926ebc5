"""The private parts of the package that tests of other rooms use, named only here.

Where things are (`locate`, `store_at`), the clocks and sizes that decide (`heartbeat`,
`chunk_grid`), and what can be made slow, or to fail.
"""

from typing import Any

from eqx_ckpt._cli import folder_commands, run_commands
from eqx_ckpt._distributed import (
    byte_broadcast,
    jax_service,
    joint_attempt,
    meeting,
    process_group,
)
from eqx_ckpt._distributed.apart_attempt import PartAttempt
from eqx_ckpt._distributed.joint_attempt import JointAttempt
from eqx_ckpt._distributed.meeting import Circle
from eqx_ckpt._distributed.process_group import Group
from eqx_ckpt._format import chunk_grid, manifest
from eqx_ckpt._format.chunk_grid import chunk_keys
from eqx_ckpt._format.dtype_names import STORED, VIEWED
from eqx_ckpt._format.leaf_names import decode
from eqx_ckpt._format.manifest import MANIFEST, Manifest
from eqx_ckpt._format.manifest_parser import from_bytes
from eqx_ckpt._format.references import INCREMENTAL, SWEPT
from eqx_ckpt._format.sample_record import RECORD
from eqx_ckpt._inspecting import content_digest, inspect_checkpoint
from eqx_ckpt._mirroring import part_uploads, step_upload, sync, uploader, uploads
from eqx_ckpt._mirroring.one_history import Beside, Between, OtherHistory
from eqx_ckpt._mirroring.step_upload import LocalProblem
from eqx_ckpt._mirroring.uploads import Uploads
from eqx_ckpt._report import write_report
from eqx_ckpt._restoring import (
    forecast,
    leaf_reader,
    placement,
    read_items,
    replica_broadcast,
    restore,
)
from eqx_ckpt._run import damage_fallback, fork_step, manager, own_disks, step_states
from eqx_ckpt._run.common_steps import CommonSteps
from eqx_ckpt._run.tiers import Tiers
from eqx_ckpt._saving import background_save, save, staging, unchanged
from eqx_ckpt._saving.known_bases import KnownBases
from eqx_ckpt._saving.layout_hint import layout_hint
from eqx_ckpt._saving.step_part import plan_part
from eqx_ckpt._sources import consistent_read, recording_source, shard_senders
from eqx_ckpt._sources.checkpoint_source import Checkpoint
from eqx_ckpt._steps import metrics_log, run_steps, run_sweeps
from eqx_ckpt._steps.run_steps import Run
from eqx_ckpt._storage.bucket import (
    bucket_attempt,
    bucket_steps,
    bucket_writer,
    heartbeat,
    keyvalue_place,
    publication,
    store_patience,
)
from eqx_ckpt._storage.bucket.bucket_attempt import BucketAttempt
from eqx_ckpt._storage.bucket.bucket_place import Memory
from eqx_ckpt._storage.bucket.bucket_steps import OrphanSweeper
from eqx_ckpt._storage.bucket.bucket_writer import BucketWriter
from eqx_ckpt._storage.bucket.heartbeat import FAIL_AFTER, Heartbeat, ORPHANED_AFTER
from eqx_ckpt._storage.bucket.keyvalue_place import KeyValues
from eqx_ckpt._storage.bucket.publication import Publication
from eqx_ckpt._storage.bucket.reference_marks import Marks
from eqx_ckpt._storage.calls import (
    file_reads,
    opening,
    posix_calls,
    send_window,
    tensorstore_calls,
    threads,
    worker_threads,
)
from eqx_ckpt._storage.calls.posix_calls import delete, exchange, LIBC
from eqx_ckpt._storage.calls.tensorstore_calls import context, open_kvstore
from eqx_ckpt._storage.chunks import (
    chunk_files,
    chunk_reads,
    chunk_values,
    ocdbt_tree,
)
from eqx_ckpt._storage.chunks.chunk_files import ChunkFiles
from eqx_ckpt._storage.chunks.chunk_values import ChunkValues
from eqx_ckpt._storage.chunks.shared_files import SharedFiles
from eqx_ckpt._storage.chunks.shared_values import SharedValues
from eqx_ckpt._storage.directory import directory_place, directory_steps, mounted_bucket
from eqx_ckpt._storage.directory.directory_place import Directory
from eqx_ckpt._storage.directory.directory_steps import DirectorySteps
from eqx_ckpt._storage.interface import (
    attempt_lock,
    chunk_bytes,
    committed_manifest,
    free_space,
)
from eqx_ckpt._storage.interface.chunk_bytes import Encoded
from eqx_ckpt._storage.interface.place import METRICS, WRITER_LOCK
from eqx_ckpt._storage.locate import locate
from eqx_ckpt._tree.leaves import leaf_data
from eqx_ckpt._tree.leaves.casting import casting_word
from eqx_ckpt._tree.plans import write_plan
from eqx_ckpt._tree.plans.write_plan import Write
from eqx_ckpt.recording import _recording as recording
from eqx_ckpt.recording._writing import (
    _recording_place as recording_place,
    _writer_thread as writer_thread,
)


__all__ = [
    "run_commands",
    "inspect_checkpoint",
    "leaf_reader",
    "restore",
    "worker_threads",
    "WRITER_LOCK",
    "writer_thread",
    "leaf_data",
    "ocdbt_tree",
    "attempt_lock",
    "background_save",
    "Beside",
    "Between",
    "bucket_attempt",
    "bucket_steps",
    "bucket_writer",
    "BucketAttempt",
    "BucketWriter",
    "byte_broadcast",
    "casting_word",
    "Checkpoint",
    "chunk_bytes",
    "chunk_files",
    "chunk_grid",
    "chunk_keys",
    "chunk_reads",
    "chunk_values",
    "ChunkFiles",
    "ChunkValues",
    "Circle",
    "committed_manifest",
    "CommonSteps",
    "consistent_read",
    "content_digest",
    "context",
    "damage_fallback",
    "decode",
    "delete",
    "Directory",
    "directory_place",
    "directory_steps",
    "DirectorySteps",
    "Encoded",
    "exchange",
    "FAIL_AFTER",
    "file_reads",
    "folder_commands",
    "forecast",
    "fork_step",
    "free_space",
    "from_bytes",
    "Group",
    "Heartbeat",
    "heartbeat",
    "INCREMENTAL",
    "jax_service",
    "joint_attempt",
    "JointAttempt",
    "keyvalue_place",
    "KeyValues",
    "KnownBases",
    "layout_hint",
    "LIBC",
    "LocalProblem",
    "locate",
    "manager",
    "manifest",
    "Manifest",
    "MANIFEST",
    "Marks",
    "meeting",
    "Memory",
    "METRICS",
    "metrics_log",
    "mounted_bucket",
    "open_kvstore",
    "opening",
    "ORPHANED_AFTER",
    "OrphanSweeper",
    "OtherHistory",
    "own_disks",
    "part_uploads",
    "PartAttempt",
    "placement",
    "plan_part",
    "posix_calls",
    "process_group",
    "publication",
    "Publication",
    "read_items",
    "RECORD",
    "recording",
    "recording_place",
    "recording_source",
    "replica_broadcast",
    "Run",
    "run_steps",
    "run_sweeps",
    "save",
    "send_window",
    "shard_senders",
    "SharedFiles",
    "SharedValues",
    "staging",
    "step_states",
    "step_upload",
    "store_at",
    "store_patience",
    "STORED",
    "SWEPT",
    "sync",
    "tensorstore_calls",
    "threads",
    "Tiers",
    "unchanged",
    "uploader",
    "Uploads",
    "uploads",
    "VIEWED",
    "Write",
    "write_plan",
    "write_report",
]


def store_at(url: str) -> Any:
    """The objects at a URL, as TensorStore sees them."""
    return tensorstore_calls.open_kvstore(locate(url).spec)
