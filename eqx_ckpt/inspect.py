"""What checkpoints and runs hold, and whether they are intact.

Of one checkpoint:

- `read_manifest` reads the names and types of all leaves, and the metadata: a
    `Manifest` of a `LeafRecord` for each leaf. A step of a run has a `History` of each
    `Session` that has led to it, and perhaps a `Fork`; of a job whose processes have
    disks of their own, it is a `Part`.
- `iter_leaves` reads all arrays, one after another.
- `verify` compares every byte with its checksum; `digest` is a SHA-256 of the content.
- `stats` computes `LeafStats` of each leaf.
- `write_report` writes a page in HTML, of a checkpoint or a run.

Of two: `diff` compares them, into a `TreeDiff` of a `LeafDiff` for each leaf that
differs; `same_leaves` says which leaves they share.

Of runs: `read_config` reads the config of one; `best_step` finds the best one;
`metrics` has the numbers of all steps; `leaf_history` has each leaf over the steps, a
`LeafHistory` of `LeafOverSteps`; `own_bytes` is what the deletion of each step frees;
`garbage_collect` removes what saves that died have left.

`TreeMatch`, of a `LeafMatch` for each leaf, is what `eqx_ckpt.tree_match` returns, and
`Audit` what `eqx_ckpt.CheckpointManager.audit` does.
"""

from ._format.leaf_record import LeafRecord as LeafRecord
from ._format.manifest import Manifest as Manifest
from ._format.run_history import (
    Fork as Fork,
    History as History,
    Part as Part,
    Session as Session,
)
from ._inspecting.audit import Audit as Audit
from ._inspecting.content_digest import digest as digest
from ._inspecting.inspect_checkpoint import (
    iter_leaves as iter_leaves,
    read_manifest as read_manifest,
    verify as verify,
)
from ._inspecting.leaf_diff import diff as diff
from ._inspecting.leaf_stats import LeafStats as LeafStats, stats as stats
from ._inspecting.same_content import same_leaves as same_leaves
from ._inspecting.tree_diff import LeafDiff as LeafDiff, TreeDiff as TreeDiff
from ._report.write_report import write_report as write_report
from ._run.leaf_history import (
    leaf_history as leaf_history,
    LeafHistory as LeafHistory,
    LeafOverSteps as LeafOverSteps,
)
from ._steps.metrics_log import metrics as metrics
from ._steps.own_bytes import own_bytes as own_bytes
from ._steps.run_config import read_config as read_config
from ._steps.run_sweeps import garbage_collect as garbage_collect
from ._steps.runs_in_folder import best_step as best_step
from ._tree.matching.leaf_match import LeafMatch as LeafMatch, TreeMatch as TreeMatch
