"""State dicts: the leaves of a tree by name, in nested dictionaries in memory."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from .._errors import CheckpointError
from .._format.chunk_grid import Region
from .._format.leaf_record import CannotSave, LeafRecord, scalar_from_text
from .._format.manifest import Manifest
from .._format.source import RegionRead, Source
from .._restoring.restore import tree_deserialise_leaves
from .._tree.leaves.casting import Casting
from .._tree.leaves.filter_spec import default_serialise_filter_spec
from .._tree.leaves.key_paths import check_distinct
from .._tree.leaves.leaf_data import shards
from .._tree.leaves.leaf_kinds import describe, fingerprint
from .._tree.leaves.transient import is_transient, marked, note_in
from .._tree.matching.name_tree import nested, sortable
from .._tree.plans.read_plan import Mismatched, Missing, Unexpected
from .._tree.plans.write_plan import named_leaves, plan_writes
from .._tree.transform.transform_argument import Transform
from .._types import Report


def to_state_dict(tree: PyTree) -> Any:
    """The leaves of a PyTree by name: what a save would write, in memory.

    **Arguments:**

    - `tree`: any PyTree that [`eqx_ckpt.tree_serialise_leaves`][] can save.

    **Returns:**

    Nested dictionaries, as [`eqx_ckpt.tree_like`][] shows them: the keys are the names
    of fields, the keys of dictionaries, and integers for positions. Arrays and PRNG
    keys are those of the tree, not copies. Python numbers are plain ones, even if they
    are an `IntEnum` in the tree. What a save leaves out, such as functions and strings,
    is not there; a tree that is a single leaf is that leaf. The `block` of an
    [`eqx_ckpt.data.Cursor`][] is there without its batches: it has the settings of the
    loader, and no leaves.

    **Raises:**

    - [`eqx_ckpt.CheckpointError`][]: lists the leaves that could not be saved.
    - [`eqx_ckpt.LeafNameError`][]: two leaves would have the same name.

    !!! example

        ```python
        import eqx_ckpt
        import equinox as eqx
        import jax

        model = eqx.nn.MLP(2, 2, 8, 2, key=jax.random.key(0))
        state = eqx_ckpt.interop.to_state_dict(model)
        assert state["layers"][0]["weight"].shape == (8, 2)
        ```
    """
    plan = plan_writes(tree, default_serialise_filter_spec, None)
    leaves = {write.name: write.leaf for write in plan.writes}

    def leaf(name: str, record: LeafRecord) -> Any:
        if record.is_array:
            return leaves[name]
        return scalar_from_text(record.kind, record.value or "")

    records = {write.name: write.record for write in plan.writes}
    if any(note_in(text) is not None for text in plan.unsaved.values()):
        for named in named_leaves(tree, default_serialise_filter_spec, None, "tree"):
            if is_transient(named.leaf):
                leaves[named.name] = named.leaf.bare()
                records[named.name] = LeafRecord("numpy", path=named.typed)
    return nested(Manifest(records), "", leaf)


def from_state_dict(
    like: PyTree,
    state: PyTree,
    *,
    transform: Transform | None = None,
    casting: Casting = "no",
    missing: Missing = "raise",
    mismatched: Mismatched = "raise",
    unexpected: Unexpected = "raise",
) -> PyTree:
    """Fill a PyTree from a state dict, as strictly as from a checkpoint.

    NumPy arrays are copied. JAX arrays and PRNG keys are not: the tree gets the arrays
    of `state`, or copies where `like` has other shardings; to donate the tree deletes
    those that both have. What is cast, or computed by `transform`, goes through the
    memory of the host.

    **Arguments:**

    - `like`: as [`eqx_ckpt.tree_deserialise_leaves`][].
    - `state`: what [`eqx_ckpt.interop.to_state_dict`][] returned, or any PyTree whose
        leaves have the names of those of `like`. The keys of positions are integers:
        `state["layers"][0]`, not `state["layers"]["0"]`. It is not changed.
    - `transform`, `casting`, `missing`, `mismatched`, `unexpected`: as
        [`eqx_ckpt.tree_deserialise_leaves`][].

    **Returns:**

    `like`, with the leaves of `state` in their places.

    **Raises:**

    - [`eqx_ckpt.LeafMismatchError`][]: `state` does not agree with `like`.
    - [`eqx_ckpt.LeafNameError`][]: two leaves of `state` have the same name.
    - [`eqx_ckpt.CheckpointError`][]: lists the leaves of `state` that are no data.

    !!! example

        ```python
        import eqx_ckpt
        import equinox as eqx
        import jax
        import jax.numpy as jnp

        def make(key):
            return eqx.nn.MLP(2, 2, 8, 2, key=key)

        state = eqx_ckpt.interop.to_state_dict(make(jax.random.key(0)))
        state["layers"][2]["bias"] = jnp.zeros(2)
        like = eqx.filter_eval_shape(make, jax.random.key(0))
        model = eqx_ckpt.interop.from_state_dict(like, state)
        ```
    """
    return tree_deserialise_leaves(
        _StateDict(state),
        like,
        transform=transform,
        casting=casting,
        missing=missing,
        mismatched=mismatched,
        unexpected=unexpected,
    )


class _StateDict(Source):
    """The leaves of a tree in memory."""

    def __init__(self, state: PyTree) -> None:
        self._leaves: dict[str, Any] = {}
        records: dict[str, LeafRecord] = {}
        unsaved: dict[str, str] = {}
        problems: list[str] = []
        paths = []
        leaves = named_leaves(
            sortable(state), default_serialise_filter_spec, None, "state"
        )
        for name, path, leaf, _, keys in leaves:
            if is_transient(leaf):
                unsaved[name] = marked(leaf)
                continue
            try:
                record = describe(leaf)
            except CannotSave as e:
                problems.append(f"- {name!r} {e}.")
                continue
            paths.append((path, name))
            if record is None:
                unsaved[name] = fingerprint(leaf)
            else:
                records[name], self._leaves[name] = record._replace(path=keys), leaf
        if problems:
            raise CheckpointError(
                "These leaves of `state` cannot be restored:\n" + "\n".join(problems)
            )
        check_distinct(paths)
        self._manifest = Manifest(records, unsaved)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    def read(
        self,
        reads: Sequence[RegionRead],
        damage: dict[str, str],
        report: Report | None = None,
    ) -> list[np.ndarray]:
        return [self._read(read, report) for read in reads]

    def _read(self, read: RegionRead, report: Report | None) -> np.ndarray:
        found = np.empty(read.shape, read.record.data_type)
        filled = 0
        for region, data in shards(self._leaves[read.name], read.record):
            inside, source = _overlap(read.region, region)
            found[inside] = data[source]
            filled += found[inside].size
        if filled < found.size:
            raise CheckpointError(
                f"Leaf {read.name!r} of `state` has parts on the devices of other "
                "processes only. Give its leaf of `like` the same sharding."
            )
        if report:
            report(read.name, found.nbytes)
        return found

    def held(self, name: str) -> jax.Array | None:
        leaf = self._leaves[name]
        return leaf if isinstance(leaf, jax.Array) else None

    def __str__(self) -> str:
        return "the state dict"


def _overlap(wanted: Region, there: Region) -> tuple[Region, Region]:
    """Where two regions overlap, within each of them."""
    both = [
        (max(a.start, b.start), min(a.stop, b.stop), a.start, b.start)
        for a, b in zip(wanted, there, strict=True)
    ]
    spans = [(start, max(start, stop), a, b) for start, stop, a, b in both]
    inside = tuple(slice(start - a, stop - a) for start, stop, a, _ in spans)
    return inside, tuple(slice(start - b, stop - b) for start, stop, _, b in spans)
