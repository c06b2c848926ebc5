"""Checkpoints of Equinox models: each leaf under its own name. See README.md."""

import importlib.metadata

from . import data as data, interop as interop
from ._errors import (
    CheckpointError as CheckpointError,
    CheckpointExistsError as CheckpointExistsError,
    CheckpointNotFoundError as CheckpointNotFoundError,
    CorruptCheckpointError as CorruptCheckpointError,
    LeafMismatchError as LeafMismatchError,
    LeafNameError as LeafNameError,
)
from ._format.leaves import LeafRecord as LeafRecord
from ._format.manifest import Manifest as Manifest
from ._format.source import RegionRead as RegionRead, Source as Source
from ._inspect import (
    leaves as leaves,
    match as match,
    read_manifest as read_manifest,
    tree_like as tree_like,
    verify as verify,
)
from ._manager import CheckpointManager as CheckpointManager
from ._progress import Progress as Progress
from ._restore import tree_deserialise_leaves as tree_deserialise_leaves
from ._retention import (
    Keep as Keep,
    keep_all as keep_all,
    keep_best as keep_best,
    keep_every as keep_every,
    keep_last as keep_last,
)
from ._save import (
    tree_serialise_leaves as tree_serialise_leaves,
    tree_serialise_leaves_async as tree_serialise_leaves_async,
)
from ._stats import LeafStats as LeafStats, stats as stats
from ._storage.url import Store as Store
from ._tree.compression import Compression as Compression
from ._tree.filter_spec import (
    default_deserialise_filter_spec as default_deserialise_filter_spec,
    default_serialise_filter_spec as default_serialise_filter_spec,
)
from ._tree.match import LeafMatch as LeafMatch, Match as Match
from ._tree.skeleton import shard_like as shard_like
from ._types import Layout as Layout
from ._when import (
    every_seconds as every_seconds,
    every_steps as every_steps,
    When as When,
)
from .interop._copy import copy as copy
from .interop._state_dict import (
    from_state_dict as from_state_dict,
    to_state_dict as to_state_dict,
)
from .recording import (
    record_scan as record_scan,
    Recorder as Recorder,
    Recording as Recording,
    SampleBuffer as SampleBuffer,
    Samples as Samples,
)


__version__ = importlib.metadata.version("eqx-ckpt")
