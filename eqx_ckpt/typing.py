"""The types of arguments, for annotations of your own functions.

Of saves and restores:

- `Layout`: how a checkpoint stores its arrays: `"zarr"`, as files, or `"ocdbt"`, in one
    database.
- `Compression`: `"zstd"`, `None`, or a function `(name, record)` that returns one of
    them.
- `Progress`: whether to show a bar, or a function `(phase, leaf, done, total)`.
- `Casting`: which dtypes become others, in the words of `numpy.can_cast`.
- `Missing`, `Mismatched`, `Unexpected`: what becomes of a leaf that the checkpoint
    lacks, of one that has another shape or dtype there, and of one that `like` lacks;
    or a function from its name to one of the words.
- `Transform`: a function from the tree of a checkpoint to one like `like`.

Of a `CheckpointManager`:

- `Keep`: a function from `{step: metadata}` of all steps to the steps to keep.
- `Mode`: whether the least or the greatest value of a metric is the best.
- `When`: a function `(step, last) -> bool`: whether to save `step`, if `last` is the
    newest.
- `OnDamage`: what a restore of a damaged newest step does.
- `OnError`: what a failed save does.

Of `eqx_ckpt.interop` and `eqx_ckpt.data`:

- `Format`: what `open_source` opens; `Target`: what `convert` writes.
- `Order`: the order in which a loader draws rows.

!!! example

    ```python
    import eqx_ckpt

    def my_save(path: str, tree, layout: eqx_ckpt.typing.Layout = "zarr") -> None:
        eqx_ckpt.tree_serialise_leaves(path, tree, layout=layout)

    my_save("ckpt", {"step": 1}, "ocdbt")
    ```
"""

from ._progress import Progress as Progress
from ._run.damage_fallback import OnDamage as OnDamage
from ._run.failed_saves import OnError as OnError
from ._steps.retention import Keep as Keep, Mode as Mode
from ._steps.save_times import When as When
from ._tree.leaves.casting import Casting as Casting
from ._tree.plans.read_plan import (
    Mismatched as Mismatched,
    Missing as Missing,
    Unexpected as Unexpected,
)
from ._tree.plans.write_plan import Compression as Compression
from ._tree.transform.transform_argument import Transform as Transform
from ._types import Format as Format, Layout as Layout, Target as Target
from .data._order import Order as Order
