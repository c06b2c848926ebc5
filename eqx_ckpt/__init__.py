"""Checkpoints of Equinox models: each leaf under its own name. See README.md.

Each name is imported at its first use, so that the command line, which only inspects
checkpoints, need not import JAX.
"""

import importlib
import typing


# Python cannot import it once the main thread has ended.
importlib.import_module("concurrent.futures.thread")

if typing.TYPE_CHECKING:
    from . import data as data, interop as interop, recording as recording
    from ._errors import (
        CheckpointError as CheckpointError,
        CheckpointExistsError as CheckpointExistsError,
        CheckpointNotFoundError as CheckpointNotFoundError,
        CorruptCheckpointError as CorruptCheckpointError,
        LeafMismatchError as LeafMismatchError,
        LeafNameError as LeafNameError,
    )
    from ._format.leaf_record import LeafRecord as LeafRecord
    from ._format.manifest import Manifest as Manifest
    from ._format.source import RegionRead as RegionRead, Source as Source
    from ._inspecting.inspect_checkpoint import (
        leaves as leaves,
        read_manifest as read_manifest,
        verify as verify,
    )
    from ._inspecting.leaf_stats import LeafStats as LeafStats, stats as stats
    from ._progress import Progress as Progress
    from ._report.write_report import write_report as write_report
    from ._restoring.restore import (
        restore_or_init as restore_or_init,
        tree_deserialise_leaves as tree_deserialise_leaves,
    )
    from ._restoring.tree_like import match as match, tree_like as tree_like
    from ._run.manager import CheckpointManager as CheckpointManager
    from ._run.retention import (
        Keep as Keep,
        keep_all as keep_all,
        keep_best as keep_best,
        keep_every as keep_every,
        keep_last as keep_last,
    )
    from ._run.run_steps import orphans as orphans, sweep as sweep
    from ._run.save_times import (
        save_every_seconds as save_every_seconds,
        save_every_steps as save_every_steps,
        When as When,
    )
    from ._saving.save import (
        tree_serialise_leaves as tree_serialise_leaves,
        tree_serialise_leaves_async as tree_serialise_leaves_async,
    )
    from ._storage.calls.store_path import StorePath as StorePath
    from ._tree.leaves.filter_spec import (
        default_deserialise_filter_spec as default_deserialise_filter_spec,
        default_serialise_filter_spec as default_serialise_filter_spec,
    )
    from ._tree.matching.leaf_match import (
        LeafMatch as LeafMatch,
        TreeMatch as TreeMatch,
    )
    from ._tree.matching.shard_like import shard_like as shard_like
    from ._tree.plans.write_plan import Compression as Compression
    from ._types import Layout as Layout
    from .interop._state_dict import (
        from_state_dict as from_state_dict,
        to_state_dict as to_state_dict,
    )
    from .interop._writers._checkpoint_copy import copy as copy
    from .recording import (
        Collector as Collector,
        record_scan as record_scan,
        Recorder as Recorder,
        Recording as Recording,
        SampleBuffer as SampleBuffer,
        Samples as Samples,
    )

    __version__: str


# The same names, for the interpreter. A test compares the two lists.
_NAMES = {
    "_errors": "CheckpointError CheckpointExistsError "
    "CheckpointNotFoundError CorruptCheckpointError "
    "LeafMismatchError LeafNameError",
    "_format.leaf_record": "LeafRecord",
    "_format.manifest": "Manifest",
    "_format.source": "RegionRead Source",
    "_inspecting.inspect_checkpoint": "leaves read_manifest verify",
    "_inspecting.leaf_stats": "LeafStats stats",
    "_progress": "Progress",
    "_report.write_report": "write_report",
    "_restoring.restore": "restore_or_init tree_deserialise_leaves",
    "_restoring.tree_like": "match tree_like",
    "_run.manager": "CheckpointManager",
    "_run.retention": "Keep keep_all keep_best keep_every keep_last",
    "_run.run_steps": "orphans sweep",
    "_run.save_times": "save_every_seconds save_every_steps When",
    "_saving.save": "tree_serialise_leaves tree_serialise_leaves_async",
    "_storage.calls.store_path": "StorePath",
    "_tree.leaves.filter_spec": "default_deserialise_filter_spec "
    "default_serialise_filter_spec",
    "_tree.matching.leaf_match": "LeafMatch TreeMatch",
    "_tree.matching.shard_like": "shard_like",
    "_tree.plans.write_plan": "Compression",
    "_types": "Layout",
    "interop._state_dict": "from_state_dict to_state_dict",
    "interop._writers._checkpoint_copy": "copy",
    "recording": "Collector record_scan Recorder Recording SampleBuffer Samples",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
_MODULES = ("data", "interop", "recording")
__all__ = [*_HOMES, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> typing.Any:
    if name == "__version__":
        from importlib.metadata import version

        value: typing.Any = version("eqx-ckpt")
    elif name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    elif name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
