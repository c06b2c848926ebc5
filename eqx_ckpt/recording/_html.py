"""A recording in a notebook."""

from .._format.recorded import Record
from .._format.screen import escape, tree_html


def record_html(head: str, record: Record) -> str:
    """What is committed: a tree of the leaves, with the bytes of all their samples."""
    draws = ", ".join(map(str, record.draws[:8])) + ", ..." * (len(record.draws) > 8)
    leaves = {
        leaf.name: (str(leaf.record), leaf.row_bytes * sum(record.draws))
        for leaf in record.leaves
    }
    metadata = "" if record.metadata is None else escape(repr(record.metadata))
    about = f"<p>{draws} draws in {record.commit} commits</p>"
    return tree_html(head, leaves) + about + (f"<p>{metadata}</p>" if metadata else "")
