"""Tell users of thousands of small arrays, once, that a database is faster."""

import logging
from collections.abc import Mapping

from .._format.leaf_record import LeafRecord


logger = logging.getLogger("eqx_ckpt")


# With so many arrays, of fewer bytes each, most of the time is that for their files.
_MANY, _SMALL = 1000, 2**16


class LayoutHint:
    """Logs once in a process that `layout="ocdbt"` saves such a tree faster."""

    def __init__(self) -> None:
        self._was_given = False

    def give(self, path: str, leaves: Mapping[str, LeafRecord]) -> None:
        """Look at leaves that were saved as a folder each."""
        found = [record.nbytes for record in leaves.values() if record.is_array]
        is_slow = len(found) >= _MANY and sum(found) < _SMALL * len(found)
        if is_slow and not self._was_given:
            self._was_given = True
            logger.info(
                "%s has %d arrays, most of them small. `layout='ocdbt'` saves such a "
                "tree several times faster.",
                path,
                len(found),
            )


layout_hint = LayoutHint()
