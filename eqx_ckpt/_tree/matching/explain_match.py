"""The error about leaves that do not match, with the ways out."""

from collections.abc import Collection, Iterator, Mapping

from ..._format.leaf_names import encode, folders
from ..._format.leaf_record import LeafRecord, SCALAR_KINDS
from .leaf_match import describe, LeafMatch, problems_of, Status


WAYS_OUT: Mapping[Status, str] = {
    "missing": "To keep what `like` has there, pass `missing='keep'`, or choose what "
    "to restore with `where`.",
    "abstract": "A `jax.ShapeDtypeStruct` has no value to keep, nor has an array that "
    "was donated: build these leaves, use `equinox.tree_at` to put arrays there, or "
    "let `restore_or_init` compute them.",
    "unexpected": "To leave them out, pass `unexpected='ignore'`. To restore a part "
    "of the checkpoint, choose it with `where` or `prefix`.",
    "shape": "Shapes are never padded, cut or broadcast: build `like` with the "
    "hyperparameters that the checkpoint was saved with. To start such leaves afresh, "
    "from their values in `like` or `init`, pass `mismatched='keep'`.",
    "dtype": "Nothing is cast unless `casting` allows it. JAX arrays of 64 bits need "
    "`jax.enable_x64(True)`.",
    "sharding": "The axes in a PartitionSpec have to divide the dimension that they "
    "are for. Choose another one, or pass a mesh as `sharding`, which replicates where "
    "the saved PartitionSpecs do not fit.",
    "loader": "To restore the position of a different loader, create the cursor in "
    "`like` by `loader.start(accept_any=True)`.",
    "kind": "Arrays become JAX or NumPy arrays, as `like` has them; PRNG keys and "
    "Python numbers, of which a subclass such as an `IntEnum` is made again, come back "
    "as what they were saved. Bytes of a custom `filter_spec` need the spec that reads "
    "them.",
}


def explain(leaves: Mapping[str, LeafMatch], is_transformed: bool = False) -> str:
    """The text of the error: the leaves, then the ways out."""
    problems = problems_of(leaves)
    ways = {leaf.status for leaf in problems.values()}
    subject = "What `transform` returns" if is_transformed else "The checkpoint"
    return "\n".join(
        [f"{subject} does not match `like`:", *describe(problems)]
        + [way for status, way in WAYS_OUT.items() if status in ways]
        + [*_hints(problems.values()), *_grown(leaves, problems)]
    )


def _hints(leaves: Collection[LeafMatch]) -> Iterator[str]:
    """What to do about a tree that a transformation of JAX or Equinox has made."""
    # Inline, as there may be 100,000 leaves: a record's kind, or the text in its place.
    expected = {(leaf[0], e if type(e := leaf[1]) is str else e[0]) for leaf in leaves}
    if not expected.isdisjoint(_PARTITIONED):
        yield (
            "Python numbers such as `Dropout.p` are leaves too, and have `None` "
            "in their place after `equinox.partition`. Restore a whole model, and "
            "partition it then; if only its parameters were saved, restore them, and "
            "`equinox.combine` them with the rest."
        )
    if ("kind", "struct") in expected and any(map(_is_number_for_struct, leaves)):
        yield (
            "`jax.eval_shape` makes a `jax.ShapeDtypeStruct` of a Python number: use "
            "`equinox.filter_eval_shape`, which leaves it as it is."
        )


_PARTITIONED = {("unexpected", "`None`"), ("missing", "float"), ("missing", "bool")}


def _is_number_for_struct(leaf: LeafMatch) -> bool:
    kinds = [x if isinstance(x, str) else x.kind for x in (leaf.expected, leaf.found)]
    return leaf.status == "kind" and kinds[0] == "struct" and kinds[1] in SCALAR_KINDS


def _grown(
    leaves: Mapping[str, LeafMatch], problems: Mapping[str, LeafMatch]
) -> Iterator[str]:
    """What to do about lists of which only the checkpoint has some entries."""
    unexpected = {n: m for n, m in problems.items() if m.status == "unexpected"}
    if not unexpected:
        return
    others = [name for name in leaves if name not in unexpected]
    there = {*others, *folders(others)}
    longest: dict[str, int] = {}
    for leaf in unexpected.values():
        found = leaf.found
        path = found.path if isinstance(found, LeafRecord) else ()
        for depth, (kind, key) in enumerate(path):
            if encode(path[: depth + 1]) in there:
                continue
            if kind == "index" and isinstance(key, int):
                parent = encode(path[:depth])
                # If `like` has nothing of it, it may be a part that was removed.
                if parent in there or depth == len(path) - 1:
                    longest[parent] = max(longest.get(parent, 0), key + 1)
                break
    for name, count in [*longest.items()][:_MOST_LISTS]:
        yield (
            f"{name!r} has {count} entries in the checkpoint, and fewer in `like`. If "
            f"it is a list that grows, build `like` with {count} entries, or load it "
            f"by itself with `eqx_ckpt.load(path, {name!r})`, and leave it out here "
            "with `unexpected`. An array, or the `metadata`, needs neither."
        )


_MOST_LISTS = 3
