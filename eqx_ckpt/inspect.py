"""What checkpoints and runs hold, and whether they are intact."""

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
from ._steps.run_sweeps import garbage_collect as garbage_collect
from ._steps.runs_in_folder import best_step as best_step
from ._tree.matching.leaf_match import LeafMatch as LeafMatch, TreeMatch as TreeMatch
