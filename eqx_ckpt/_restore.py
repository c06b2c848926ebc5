"""Restore the leaves of a PyTree from a checkpoint."""

import functools as ft
import io
from collections.abc import Callable
from typing import Any, Unpack

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from ._distributed.meeting import check_deadline, DEADLINE
from ._distributed.reading import (
    everybody,
    JointReading,
    outline_of,
    readers,
    wanted_by,
)
from ._errors import LeafMismatchError
from ._format.dtypes import is_numpys
from ._format.leaves import describe_like
from ._format.manifest import fingerprint
from ._format.parse import scalar_from_text
from ._format.source import Source
from ._format.transient import stop_at_transients
from ._progress import Progress, reporting
from ._storage.reading import read_consistently
from ._transfer.computing import Check, Leaves
from ._transfer.initialising import initialised
from ._transfer.placement import moved
from ._transfer.reading import Arrived, assembled
from ._tree.casting import becomes, Casting, would_narrow
from ._tree.filter_spec import (
    default_deserialise_filter_spec,
    LeafReader,
    restored_by,
)
from ._tree.parts import Read
from ._tree.reads import (
    How,
    match_leaf,
    Missing,
    plan_reads,
    ReadPlan,
    Request,
    Unexpected,
)
from ._tree.sharding import place
from ._tree.transform import Transform
from ._types import check_flag, check_function, IsLeaf, PathLike, Spec


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
    unexpected: Unexpected = "raise",
    transform: Transform | None = None,
    read_once: bool = False,
    progress: Progress = False,
    deadline: float = DEADLINE,
) -> PyTree:
    """Restore the leaves of a PyTree, or of a part of it.

    All differences between the checkpoint and `like` are found before any array is
    read. The checksum of everything that is read is verified.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or a [`eqx_ckpt.Source`][].
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
        `prefix="model/encoder"` restores one submodule from its own skeleton.
    - `sharding`: where to put JAX arrays and PRNG keys. `None`: as in `like`. A
        `jax.sharding.Sharding` or a device: all leaves there. A mesh: with the
        PartitionSpecs that were saved, on this mesh; axes that the mesh lacks, or that
        do not divide a leaf, are replicated ([`eqx_ckpt.match`][] lists them). A
        function `(name, struct)` that returns one of these for each leaf. Or a PyTree
        prefix of `like` with any of these.
    - `casting`: which leaves may be cast to the dtype in `like`, in NumPy's words:
        `"no"` (none), `"safe"` (such as bfloat16 to float32), `"same_kind"` (also
        float32 to bfloat16), or `"unsafe"` (also floats to integers). Python numbers
        count as `float64`, `int64`, `complex128` and `bool`. PRNG keys are never cast.
    - `missing`: what to do with leaves of `like` that are not in the checkpoint:
        `"raise"`, or `"keep"` their value from `like`. Or a function from the name of
        such a leaf to one of these.
    - `unexpected`: what to do with leaves of the checkpoint that are not in `like`:
        `"raise"`, or `"ignore"` them. Or a function from the name of such a leaf to one
        of these.
    - `transform`: a pure function that takes the checkpoint's tree, as
        [`eqx_ckpt.tree_like`][] returns it (with `prefix`, that part), and returns a
        tree whose leaves have the names of those in `like`. It is traced once, before
        anything is read. Leaves that it returns unchanged, or stacks or concatenates
        along the first axis, are read straight to their place. The others are computed
        part by part, so that memory holds only the result and the inputs of one part.
        Leaves that it does not use are not read.
    - `read_once`: in a job of several processes that hold the same data, let one
        process read it and send it to the others over the interconnect of the devices.
        This is faster if the storage is slower than the interconnect. All processes
        must pass the same value. It has no effect on leaves with one replica, nor on
        dtypes other than integers and floats of 16 or 32 bits.
    - `progress`: a function `(phase, leaf, done, total)`, called with `"read"` or
        `"place"` (on devices), the name of a leaf, and two numbers of bytes; or `True`,
        to show a bar.
    - `deadline`: in a job whose processes read parts of the same arrays, the seconds
        that a process waits for the others. Then all of them raise.

    **Returns:**

    `like`, with the restored leaves in their places.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint at `source`.
    - [`eqx_ckpt.LeafMismatchError`][]: the checkpoint does not agree with `like`.
    - [`eqx_ckpt.CorruptCheckpointError`][]: a file is damaged or missing.
    - `OSError`: the file system fails.

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
        unexpected,
        transform,
    )
    return _restored(source, request, read_once, progress, deadline)


def _restored(
    source: PathLike | Source,
    request: Request,
    read_once: bool = False,
    progress: Progress = False,
    deadline: float = DEADLINE,
) -> PyTree:
    def plan_of(found: Source) -> Callable[[], tuple[ReadPlan, Arrived]]:
        plan = plan_reads(found.manifest, request)
        plan.check()
        joint.outline = [] if joint.is_alone else outline_of(plan.places)
        if not read_once:
            joint.members = readers(plan.shardings)
        return lambda: (
            plan,
            _carry_out(found, plan, joint.check, progress, read_once),
        )

    check_deadline(deadline)
    check_flag("read_once", read_once)
    guess = ft.partial(wanted_by, request.like, request.sharding)
    guess = everybody if read_once else guess
    joint = JointReading(source, deadline, guess, read_once=read_once)
    # What is read is there, even while JAX traces the caller.
    with jax.ensure_compile_time_eval():
        try:
            plan, arrived = read_consistently(
                source, plan_of, None if joint.is_alone else joint.agree
            )
        finally:
            joint.close()
        return plan.filled(assembled(arrived))


class _Arguments(How, total=False):
    """The other arguments of `restore_or_init`: see `tree_deserialise_leaves`."""

    filter_spec: PyTree
    is_leaf: IsLeaf
    read_once: bool
    progress: Progress
    deadline: float


def restore_or_init(
    source: PathLike | Source,
    init: Callable[..., PyTree],
    *args: Any,
    **how: Unpack[_Arguments],
) -> PyTree:
    """Restore what a checkpoint has, and initialise only the rest.

    Use this for a pretrained model with a new head or an adapter. Restored leaves are
    not initialised first, so the tree is never in memory twice.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, or a [`eqx_ckpt.Source`][].
    - `init`: a function that makes the whole tree, such as a model. It is traced, and
        `jax.jit` computes only the leaves that were not restored: those that the
        checkpoint does not have, and those that `where` does not pick.
    - `args`: the arguments of `init`.
    - `how`: as [`eqx_ckpt.tree_deserialise_leaves`][]. `sharding` also says where to
        put new leaves; with a mesh, new leaves are replicated. The default of `missing`
        is `"keep"` here; pass a function to say which leaves may be missing.

    **Returns:**

    The tree of `init`, with the leaves of the checkpoint in their places.

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
    arguments: dict[str, Any] = {"missing": "keep", **how}
    running = {
        key: arguments.pop(key)
        for key in ("read_once", "progress", "deadline")
        if key in arguments
    }
    like = eqx.filter_eval_shape(init, *args)
    request = Request(like, initialises=True, **arguments)
    tree = _restored(source, request, **running)
    return initialised(tree, stop_at_transients(request.is_leaf), init, args)


def _carry_out(
    source: Source,
    plan: ReadPlan,
    check: Check,
    progress: Progress,
    read_once: bool,
) -> Arrived:
    with reporting(progress, plan.match.nbytes) as report:
        leaves = Leaves(source, plan.derived, report)
        arrived = leaves.arrived(plan, read_once, check)
        for read in plan.reads:
            if read.spec is not None:
                value = _restore_through(read.spec, leaves, read, plan.casting)
                arrived.values[read.position] = value
    return arrived


def _restore_through(spec: Spec, leaves: Leaves, read: Read, casting: Casting) -> Any:
    """Call a custom `filter_spec` for a leaf, which it may or may not read."""

    def content() -> bytes:
        if _narrows(read):
            raise LeafMismatchError(
                f"Leaf {read.name!r} is {read.record}, which JAX would narrow while "
                "x64 is off. Let the `filter_spec` call "
                "`eqx_ckpt.default_deserialise_filter_spec` for this leaf."
            )
        return _content(leaves, read)

    def restore(like: Any) -> Any:
        match, new = match_leaf(like, None, read.record, casting)
        if not match.is_harmless:
            raise LeafMismatchError(
                f"Leaf {read.name!r}: {match.expected} in the call of "
                f"`default_deserialise_filter_spec`, {match.found} in the checkpoint."
            )
        where_to = place(read.place.target, read.name, like, new)
        if where_to.problem:
            raise LeafMismatchError(f"Leaf {read.name!r}: {where_to.problem}.")
        return leaves.value(read._replace(like=like, becomes=new, place=where_to))

    f = LeafReader(read.name, read.path, content, restore)
    assert read.spec is not None
    value = restored_by(spec, f, read.like)
    problem = _changed(value, read.like)
    if problem:
        raise LeafMismatchError(
            f"The `filter_spec` returned {problem[0]} for leaf {read.name!r}, which is "
            f"{problem[1]} in `like`. Return a leaf of the same type, shape and dtype."
        )
    if value is read.like or not isinstance(value, jax.Array):
        return value
    kind = "key" if read.record.kind == "key" else "jax"
    where_to = place(
        read.place.target, read.name, read.like, read.record._replace(kind=kind)
    )
    if where_to.problem:
        raise LeafMismatchError(f"Leaf {read.name!r}: {where_to.problem}.")
    return moved(value, where_to.sharding)


def _narrows(read: Read) -> bool:
    becomes_jax = isinstance(read.like, jax.Array | jax.ShapeDtypeStruct)
    return becomes_jax and would_narrow(read.record.dtype)


def _changed(value: Any, like: Any) -> tuple[str, str] | None:
    """Describe both leaves if they differ by Equinox's check; `None` otherwise."""
    same_type = type(value) is type(like)
    expected, found = describe_like(like), describe_like(value)
    if expected is None or found is None:
        return None if same_type else (fingerprint(value), fingerprint(like))
    # A `np.memmap` becomes an array, and `np.longlong` has a name of its own.
    same_type |= expected.is_array or expected.kind == "struct"
    if same_type and becomes(expected, found, "no") is found:
        return None
    return str(found), str(expected)


def _content(leaves: Leaves, read: Read) -> bytes:
    """The bytes that Equinox would have written for a leaf, such as an `.npy` file."""
    f = io.BytesIO()
    if not read.record.is_array:
        eqx.default_serialise_filter_spec(
            f, scalar_from_text(read.record.kind, read.record.value or "")
        )
        return f.getvalue()
    array = leaves.on_host(read)
    if read.record.kind == "bytes":
        return array.tobytes()
    # `np.save` would write JAX's dtypes as voids; write their names.
    descr = array.dtype.str if is_numpys(array.dtype) else array.dtype.name
    header = {"descr": descr, "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(f, header)
    return f.getvalue() + array.tobytes()
