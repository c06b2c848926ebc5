"""Find the saved step that a replay of the training does not reproduce."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .._errors import CorruptCheckpointError, LeafMismatchError
from .._format.chunk_grid import start_of
from .._format.leaf_record import dtype_from_tag, LeafRecord
from .._tree.leaves.filter_spec import default_serialise_filter_spec
from .._tree.leaves.leaf_data import device_shards, shards
from .._tree.leaves.leaf_kinds import describe
from .._tree.leaves.transient import is_transient, stop_at_transients
from .._tree.matching.leaf_match import problems_of
from .._tree.plans.read_plan import ReadPlan
from .._tree.plans.write_plan import named_leaves


# So many leaves are named in a text.
_MOST = 10


@dataclass(frozen=True)
class Audit:
    """What [`eqx_ckpt.CheckpointManager.audit`][] found; it prints as a sentence.

    **Attributes:**

    - `steps`: the saved steps that were compared, in order.
    - `since`: the last step that the replay reproduces, or the one where it began.
    - `step`: the first saved step that it does not reproduce, or `None`.
    - `leaves`: the names of the leaves that differ there, in the order of the tree.

    !!! example

        ```python
        import eqx_ckpt

        with eqx_ckpt.CheckpointManager("run") as manager:
            for step in (1, 2):
                manager.save(step, {"step": step})
            found = manager.audit(lambda state, step: {"step": step}, {"step": 0}, 1, 2)
        assert (found.steps, found.step) == ((2,), None)
        print(found)
        ```
    """

    steps: tuple[int, ...]
    since: int
    step: int | None = None
    leaves: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the replay reproduces each step."""
        return self.step is None

    def __str__(self) -> str:
        if self.step is None:
            return f"The replay reproduces {', '.join(map(str, self.steps))}."
        names = ", ".join(map(repr, self.leaves[:_MOST]))
        more = f" and {len(self.leaves) - _MOST} more" * (len(self.leaves) > _MOST)
        return (
            f"The replay from step {self.since} does not reproduce step {self.step}, "
            f"which differs in {names}{more}."
        )


def check_like(step: int, plan: ReadPlan) -> None:
    """Raise unless `like` has all leaves of a step as they were saved, and no others.

    An audit has no arguments by which a restore could leave out, keep or cast some.
    """
    lines = [
        f"- {name!r}: {match.found}: {match.expected}."
        if match.status == "sharding"
        else f"- {name!r}: {match.expected} in `like`, {match.found} in the checkpoint."
        for name, match in problems_of(plan.leaves).items()
    ]
    if lines:
        raise LeafMismatchError(
            f"Step {step} does not match `like`:\n{_first(lines)}\n"
            "An audit compares all that was saved, so `like` has to be what was saved: "
            "with the same leaves, shapes and dtypes, and `None` for what was not "
            "saved. JAX arrays of 64 bits need `jax.enable_x64(True)`. `sharding` may "
            "differ; its axes have to divide the dimensions that they are for."
        )


def _first(lines: Sequence[str]) -> str:
    more = [f"... and {len(lines) - _MOST} more"] * (len(lines) > _MOST)
    return "\n".join([*lines[:_MOST], *more])


def damaged(problem: CorruptCheckpointError, *, is_own: bool) -> CorruptCheckpointError:
    """The error about a step that cannot be compared, with the way out."""
    way = "audit other steps, or those of a mirror, by a manager of that."
    if is_own:
        way = f"restore the step with it first, or {way}"
    return CorruptCheckpointError(f"{problem}\n`audit` has no `on_damage`: {way}")


class _Leaf(NamedTuple):
    leaf: Any
    record: LeafRecord


def replay(
    steps: Sequence[int],
    step_fn: Callable[[PyTree, int], PyTree],
    restore: Callable[[int, PyTree | None], PyTree],
    agree: Callable[[int, list[int]], list[int]],
) -> Audit:
    """Go on from the first of some saved steps, to one that is not reproduced.

    `restore` returns a saved step, placed as a tree is. `agree` makes of what each
    process says of each leaf what is true in any of them.
    """
    since = steps[0]
    state = restore(since, None)
    records = _records(state)
    for place, step in enumerate(steps[1:], 2):
        for number in range(since + 1, step + 1):
            state = step_fn(state, number)
            _check_alike(records, _records(state), number)
        made, saved = _leaves(state), _leaves(restore(step, state))
        differ = agree(step, [_differ(made[name], saved[name]) for name in records])
        if any(differ):
            names = [n for n, is_so in zip(records, differ, strict=True) if is_so]
            return Audit(tuple(steps[1:place]), since, step, tuple(names))
        since = step
    return Audit(tuple(steps[1:]), since)


def _leaves(tree: PyTree) -> dict[str, _Leaf]:
    """The leaves that are saved, by name."""
    is_leaf = stop_at_transients(None)
    named = named_leaves(tree, default_serialise_filter_spec, is_leaf, "like")
    return {
        name: _Leaf(leaf, record)
        for name, _, leaf, *_ in named
        if not is_transient(leaf) and (record := describe(leaf))
    }


def _records(tree: PyTree) -> dict[str, LeafRecord]:
    return {name: record for name, (_, record) in _leaves(tree).items()}


def _check_alike(
    before: Mapping[str, LeafRecord], after: Mapping[str, LeafRecord], step: int
) -> None:
    """Raise if `step_fn` returned another tree than it got."""
    problems = [
        f"- {name!r}: {before.get(name, 'nothing')} before, and "
        f"{after.get(name, 'nothing')} after."
        for name in {**before, **after}
        if _type_of(before.get(name)) != _type_of(after.get(name))
    ]
    if problems:
        raise ValueError(
            f"`step_fn` returned another tree than it got, at step {step}:\n"
            f"{_first(problems)}\nIt takes what was saved, and the number of the step "
            "to make, and returns what is saved then."
        )


def _type_of(record: LeafRecord | None) -> tuple[Any, ...]:
    """What a leaf keeps from step to step: not whether NumPy or JAX has its array."""
    if record is None:
        return ()
    if record.value is not None:
        return (record.kind,)
    if record.kind == "key":
        return record.impl, record.shape
    # Nor in which order the bytes of a number are.
    return dtype_from_tag(record.dtype).newbyteorder("="), record.shape


def _differ(made: _Leaf, saved: _Leaf) -> int:
    """1 if not all bits of a leaf on each device are those saved, otherwise 0."""
    if made.record.value is not None:
        return int(made.record.value != saved.record.value)
    # Cut as the saved one.
    found = device_shards(made.leaf, saved.record)
    expected = {start_of(region): data for region, data in shards(*saved)}
    return int(any(a.tobytes() != expected[start_of(r)].tobytes() for r, a in found))
