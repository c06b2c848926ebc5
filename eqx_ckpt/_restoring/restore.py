"""Restore the leaves of a PyTree from a checkpoint."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import jax
from jaxtyping import PyTree

from .._distributed.jax_service import is_alone
from .._distributed.joint_reading import JointReading
from .._distributed.meeting import check_timeout, TIMEOUT
from .._errors import warn
from .._format.source import Source
from .._progress import Progress, reporting
from .._sources.part_source import check_is_whole
from .._storage.calls.file_reads import read_again_soon
from .._tree.leaves.casting import Casting
from .._tree.leaves.filter_spec import default_deserialise_filter_spec
from .._tree.leaves.skeleton import skeleton
from .._tree.leaves.transient import stop_at_transients
from .._tree.matching.leaf_match import describe, LeafMatch
from .._tree.plans.read_plan import (
    Mismatched,
    Missing,
    plan_reads,
    ReadPlan,
    Request,
    Unexpected,
)
from .._tree.transform.transform_argument import Transform
from .._types import check_flag, check_function, IsLeaf, PathLike
from .custom_spec_read import restore_through
from .forecast import check_max_host_bytes, forecast
from .leaf_reader import Announce, Arrived, assembled, How
from .missing_leaves import initialised
from .read_items import USUAL
from .transform_compute import Leaves


def tree_deserialise_leaves(
    source: PathLike | Source,
    like: PyTree,
    filter_spec: PyTree = default_deserialise_filter_spec,
    is_leaf: IsLeaf = None,
    *,
    where: Callable[[PyTree], Any] | None = None,
    prefix: str = "",
    sharding: PyTree = None,
    casting: Casting = "no",
    missing: Missing = "raise",
    mismatched: Mismatched = "raise",
    unexpected: Unexpected = "raise",
    transform: Transform | None = None,
    broadcast_replicas: bool = False,
    max_host_bytes: int | None = None,
    progress: Progress = False,
    timeout: float = TIMEOUT,
) -> PyTree:
    """Restore the leaves of a PyTree, or of a part of it.

    All differences between the checkpoint and `like` are found before any array is
    read. The checksum of everything that is read is verified.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][].
    - `like`: a PyTree of the structure that was saved, with arrays or
        `jax.ShapeDtypeStruct`s (see `equinox.filter_eval_shape`) of the same shapes and
        dtypes. A leaf with a sharding is restored onto that sharding; any other leaf
        goes, uncommitted, to the default device. Leaves that are not saved keep their
        value from `like`.
    - `filter_spec`: as that of `equinox.tree_deserialise_leaves`: a function
        `(f, leaf) -> leaf` that reads the leaf from the file `f`, or calls
        [`eqx_ckpt.default_deserialise_filter_spec`][] (or Equinox's), or returns `leaf`
        to keep it; or a PyTree prefix of such functions.
    - `is_leaf`: as [`eqx_ckpt.tree_serialise_leaves`][].
    - `where`: restore only this part of `like`, as in `equinox.tree_at`; no other leaf
        is read. For example `where=lambda tree: tree["model"]`, or a tuple of nodes.
    - `prefix`: the name of the part of the checkpoint that `like` describes:
        `prefix="model/encoder"` restores one submodule from its own skeleton. The names
        that functions get and errors have are those of the checkpoint, `prefix`
        included; with a `transform`, those of what it returns.
    - `sharding`: where to put JAX arrays and PRNG keys. `None`: as in `like`. A
        `jax.sharding.Sharding` or a device: all leaves there. A mesh: with the
        PartitionSpecs that were saved, on this mesh; axes that the mesh lacks, or that
        do not divide a leaf, are replicated ([`eqx_ckpt.tree_match`][] lists them). A
        function `(name, struct)` that returns one of these for each leaf. Or a PyTree
        prefix of `like` with any of these.
    - `casting`: which leaves may be cast to the dtype in `like`, in NumPy's words:
        `"no"` (none), `"safe"` (such as bfloat16 to float32), `"same_kind"` (also
        float32 to bfloat16), or `"unsafe"` (also floats to integers). Python numbers
        count as `float64`, `int64`, `complex128` and `bool`. PRNG keys are never cast.
    - `missing`: what to do with leaves of `like` that are not in the checkpoint:
        `"raise"`, or `"keep"` their value from `like`. Or a function from the name of
        such a leaf to one of these.
    - `mismatched`: what to do with leaves of `like` that have another shape in the
        checkpoint, or a dtype or kind that is not restored as theirs: `"raise"`, or
        `"keep"` their value from `like`, such as a fresh head for other classes. Or a
        function from the name of such a leaf to one of these. A leaf with a
        `filter_spec` of yours is what that makes of it.
    - `unexpected`: what to do with leaves of the checkpoint that are not in `like`:
        `"raise"`, or `"ignore"` them. Or a function from the name of such a leaf to one
        of these.
    - `transform`: a pure function that takes the checkpoint's tree, as
        [`eqx_ckpt.tree_like`][] returns it (with `prefix`, that part), and returns a
        tree whose leaves have the names of those in `like`. It is traced once, before
        anything is read. Leaves that it returns unchanged, or stacks or concatenates
        along the first axis, are read straight to their place. The others are computed
        part by part, so that memory holds only the result and the inputs of one part.
        Leaves that it does not use are not read; of those that it indexes by numbers
        and slices, also after it has joined, transposed or reshaped them, only that
        part is.
    - `broadcast_replicas`: in a job of several processes that hold the same data, let
        one process read it and send it to the others over the interconnect of the
        devices. This is faster if the storage is slower than the interconnect. All
        processes must pass the same value. It has no effect on leaves with one replica,
        nor on dtypes other than integers and floats of 16 or 32 bits.
    - `max_host_bytes`: the most host memory that the restore may take in this process,
        besides what the process has already. Then less is read at a time, and arrays
        for other devices that are larger arrive in pieces. What is restored to host
        memory is part of it: NumPy arrays, and JAX arrays on a CPU. So it has a least
        value; [`eqx_ckpt.tree_match`][] says it, and what a restore takes otherwise.
        Memory that XLA needs within the computations of a `transform` is not counted.
    - `progress`: a function `(phase, leaf, done, total)`, called with `"read"` or
        `"place"` (on devices), the name of a leaf, and two numbers of bytes; or `True`,
        to show a bar.
    - `timeout`: in a job whose processes read parts of the same arrays, the seconds
        that a process waits for the others. Then all of them raise.

    **Returns:**

    `like`, with the restored leaves in their places.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - [`eqx_ckpt.LeafMismatchError`][]: the checkpoint does not agree with `like`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: a file is damaged or missing.
    - `OSError`: the file system fails.
    - `ValueError`: the restore takes more than `max_host_bytes`; nothing was read.

    !!! example

        ```python
        import equinox as eqx
        import eqx_ckpt
        import jax

        def make(key):
            return {"model": eqx.nn.MLP(2, 2, 8, 2, key=key), "step": 0}

        eqx_ckpt.tree_serialise_leaves("runs/mlp", make(jax.random.key(0)))
        like = eqx.filter_eval_shape(make, jax.random.key(0))
        state = eqx_ckpt.tree_deserialise_leaves("runs/mlp", like)
        model = eqx_ckpt.tree_deserialise_leaves(
            "runs/mlp", like["model"], prefix="model"
        )
        ```
    """
    request = Request(
        like,
        filter_spec,
        is_leaf,
        where,
        prefix,
        sharding,
        casting,
        missing,
        mismatched,
        unexpected,
        transform,
    )
    means = Means(broadcast_replicas, max_host_bytes, progress, timeout)
    return restored(source, request, means).tree


# Called while something is restored; raises once that is of no use.
Check: TypeAlias = Callable[[], None] | None


class Means(NamedTuple):
    """How a restore goes about it; see there."""

    broadcast_replicas: bool
    max_host_bytes: int | None
    progress: Progress
    timeout: float
    check: Check = None


class Restored(NamedTuple):
    """What was requested, the version of the source that was read, and the matches."""

    tree: PyTree
    source: Source
    leaves: Mapping[str, LeafMatch]


def restored(source: PathLike | Source, request: Request, means: Means) -> Restored:
    """Read what is requested."""
    check_timeout(means.timeout)
    check_flag("broadcast_replicas", means.broadcast_replicas)
    check_max_host_bytes(means.max_host_bytes)
    reading = JointReading(
        source, request, means.timeout, broadcast_replicas=means.broadcast_replicas
    )
    # What is read is there, even while JAX traces the caller.
    with jax.ensure_compile_time_eval():
        found, plan, arrived = _read(reading, means)
        return Restored(plan.filled(assembled(arrived)), found, plan.leaves)


def _read(reading: JointReading, means: Means) -> tuple[Source, ReadPlan, Arrived]:
    # The processes of a job may share a machine, and read the same files.
    with reading, nullcontext() if is_alone() else read_again_soon():
        while True:
            with reading.version():
                return _read_version(reading, means)


def _read_version(
    reading: JointReading, means: Means
) -> tuple[Source, ReadPlan, Arrived]:
    source = reading.open()
    check_is_whole(source)
    if means.check is not None:
        means.check()
    plan = plan_reads(source.manifest, reading.request)
    plan.check()
    limits = USUAL
    if means.max_host_bytes is not None:
        costs = forecast(source, plan, means.broadcast_replicas)
        limits = costs.limits(means.max_host_bytes)
    reading.agree_on(plan)
    with reporting(means.progress, plan.nbytes) as report:
        announce = _checking(report, means.check)
        how = How(announce, means.broadcast_replicas, limits)
        leaves = Leaves(source, plan.derived, how)
        arrived = leaves.read(plan.direct)
        for part in plan.parts:
            inputs = leaves.read_inputs(part)
            if part.is_shared:
                reading.check_others()
            arrived.values.update(leaves.computed(part, inputs))
        for read in plan.custom:
            value = restore_through(leaves, read, plan.request.casting)
            arrived.values[read.position] = value
    reading.confirm()
    if reading.broadcast_replicas:
        # A process that dies meanwhile fails the others in JAX, which does not name it.
        jax.block_until_ready(list(assembled(arrived).values()))
        reading.check_others()
    return source, plan, arrived


def _checking(report: Announce | None, check: Check) -> Announce | None:
    """A report that checks before it reports."""
    if check is None:
        return report

    def announce(*what: Any) -> None:
        check()
        if report is not None:
            report(*what)

    return announce


def restore_or_init(
    source: PathLike | Source,
    init: Callable[..., PyTree],
    *args: Any,
    filter_spec: PyTree = default_deserialise_filter_spec,
    is_leaf: IsLeaf = None,
    where: Callable[[PyTree], Any] | None = None,
    prefix: str = "",
    sharding: PyTree = None,
    casting: Casting = "no",
    missing: Missing = "keep",
    mismatched: Mismatched = "raise",
    unexpected: Unexpected = "raise",
    transform: Transform | None = None,
    broadcast_replicas: bool = False,
    max_host_bytes: int | None = None,
    progress: Progress = False,
    timeout: float = TIMEOUT,
) -> PyTree:
    """Restore what a checkpoint has, and initialise only the rest.

    Use this for a pretrained model with a new head or an adapter. Restored leaves are
    not initialised first, so the tree is never in memory twice; but NumPy makes its
    arrays at once, while JAX traces `init`. Python numbers, such as a rate of dropout,
    are restored, too: a warning lists those that `init` has otherwise. To keep those of
    `init`, pass `filter_spec=eqx_ckpt.array_deserialise_filter_spec`.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or a
        [`eqx_ckpt.interop.Source`][].
    - `init`: a function that makes the whole tree, such as a model. It is traced, and
        `jax.jit` computes only the leaves that were not restored: those that the
        checkpoint does not have, and those that `where` does not pick.
    - `args`: the arguments of `init`.
    - All others: as [`eqx_ckpt.tree_deserialise_leaves`][]. `sharding` also says where
        to put new leaves; with a mesh, new leaves are replicated. The default of
        `missing` is `"keep"` here; pass a function to say which leaves may be missing.
        What `missing` and `mismatched` keep is computed by `init`, after the restore
        that `max_host_bytes` is for.

    **Returns:**

    The tree of `init`, with the leaves of the checkpoint in their places. Arrays and
    numbers of NumPy are NumPy's, as `init()` returns them.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`. This
        function never falls back to `init` alone.
    - As [`eqx_ckpt.tree_deserialise_leaves`][].

    !!! example

        ```python
        import equinox as eqx
        import eqx_ckpt
        import jax

        def init(key):
            base, head = jax.random.split(key)
            return {
                "base": eqx.nn.MLP(2, 8, 8, 2, key=base),
                "head": eqx.nn.Linear(8, 3, key=head),
            }

        base = eqx.nn.MLP(2, 8, 8, 2, key=jax.random.key(0))
        eqx_ckpt.tree_serialise_leaves("runs/pretrained", {"base": base})
        model = eqx_ckpt.restore_or_init("runs/pretrained", init, jax.random.key(1))
        assert (model["base"].layers[0].weight == base.layers[0].weight).all()
        ```
    """
    check_function("init", init)
    request = Request(
        skeleton(init, *args),
        filter_spec,
        is_leaf,
        where,
        prefix,
        sharding,
        casting,
        missing,
        mismatched,
        unexpected,
        transform,
        initialises=True,
    )
    means = Means(broadcast_replicas, max_host_bytes, progress, timeout)
    found = restored(source, request, means)
    _warn_of_numbers(found.leaves)
    return initialised(found.tree, stop_at_transients(request.is_leaf), init, args)


def _warn_of_numbers(leaves: Mapping[str, LeafMatch]) -> None:
    """Warn of the Python numbers that are not those of `init`: it may be a new rate."""
    differing = {n: leaf for n, leaf in leaves.items() if leaf.status == "value"}
    if differing:
        lines = [
            "Python numbers came from the checkpoint, and `init` has others:",
            *describe(differing),
            "To keep those of `init`, pass "
            "`filter_spec=eqx_ckpt.array_deserialise_filter_spec`, or a PyTree with it "
            "in some places. To take them without this warning, ignore it by its first "
            "words.",
        ]
        warn("\n".join(lines))
