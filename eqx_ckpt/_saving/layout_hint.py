"""Tell users of thousands of small arrays, once, that a database is faster."""

import logging

from .._format.manifest import Manifest


logger = logging.getLogger("eqx_ckpt")


# With so many arrays, of fewer bytes each, most of the time is that for their files.
_MANY, _SMALL = 1000, 2**16


class LayoutHint:
    """Logs once in a process that `layout="ocdbt"` saves such a tree faster."""

    def __init__(self) -> None:
        self._was_given = False

    def give(self, path: str, manifest: Manifest) -> None:
        found = [
            record.nbytes for record in manifest.leaves.values() if record.is_array
        ]
        is_slow = len(found) >= _MANY and sum(found) < _SMALL * len(found)
        if is_slow and manifest.layout == "zarr" and not self._was_given:
            self._was_given = True
            logger.info(
                "%s has %d arrays, most of them small. `layout='ocdbt'` saves such a "
                "tree several times faster.",
                path,
                len(found),
            )


layout_hint = LayoutHint()
