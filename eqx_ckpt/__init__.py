"""Checkpoints of Equinox models: each leaf under its own name. See README.md."""

import importlib.metadata

from ._deserialise import tree_deserialise_leaves as tree_deserialise_leaves
from ._errors import (
    CheckpointError as CheckpointError,
    CheckpointExistsError as CheckpointExistsError,
    CheckpointNotFoundError as CheckpointNotFoundError,
    CorruptCheckpointError as CorruptCheckpointError,
    LeafMismatchError as LeafMismatchError,
    LeafNameError as LeafNameError,
)
from ._filter_spec import (
    default_deserialise_filter_spec as default_deserialise_filter_spec,
    default_serialise_filter_spec as default_serialise_filter_spec,
)
from ._inspect import (
    match as match,
    read_manifest as read_manifest,
    tree_like as tree_like,
    verify as verify,
)
from ._leaves import LeafRecord as LeafRecord
from ._manifest import Manifest as Manifest
from ._match import LeafMatch as LeafMatch, Match as Match
from ._serialise import tree_serialise_leaves as tree_serialise_leaves


__version__ = importlib.metadata.version("eqx-ckpt")
