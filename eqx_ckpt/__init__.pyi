"""The names of `eqx_ckpt`, each imported at its first use."""

from . import (
    data as data,
    inspect as inspect,
    interop as interop,
    recording as recording,
    typing as typing,
)
from ._errors import (
    CheckpointError as CheckpointError,
    CheckpointExistsError as CheckpointExistsError,
    CheckpointNotFoundError as CheckpointNotFoundError,
    CorruptCheckpointError as CorruptCheckpointError,
    LeafMismatchError as LeafMismatchError,
    LeafNameError as LeafNameError,
)
from ._inspecting.load_leaves import load as load
from ._mirroring.mirror import Mirror as Mirror
from ._mirroring.sync import sync as sync
from ._restoring.restore import (
    restore_or_init as restore_or_init,
    tree_deserialise_leaves as tree_deserialise_leaves,
)
from ._restoring.tree_like import tree_like as tree_like, tree_match as tree_match
from ._run.manager import CheckpointManager as CheckpointManager
from ._saving.save import (
    tree_serialise_leaves as tree_serialise_leaves,
    tree_serialise_leaves_async as tree_serialise_leaves_async,
)
from ._sources.average_source import average as average
from ._steps.retention import (
    keep_best as keep_best,
    keep_every as keep_every,
    keep_last as keep_last,
)
from ._steps.save_times import (
    save_every_seconds as save_every_seconds,
    save_every_steps as save_every_steps,
)
from ._steps.save_when_idle import save_when_idle as save_when_idle
from ._storage.calls.store_path import StorePath as StorePath
from ._tree.leaves.filter_spec import (
    array_deserialise_filter_spec as array_deserialise_filter_spec,
    default_deserialise_filter_spec as default_deserialise_filter_spec,
    default_serialise_filter_spec as default_serialise_filter_spec,
)
from ._tree.matching.shard_like import shard_like as shard_like
from ._tree.transform.rename import rename as rename
from .interop._writers._checkpoint_copy import copy as copy

__version__: str
