"""What this process knows of checkpoints that its last saves had as a base, or made.

A manager knows that of its own steps. This is for saves without one.
"""

from collections import OrderedDict

from .._errors import CheckpointError
from .._sources.checkpoint_source import base_at
from .._storage.calls.threads import ForkedLock
from .._storage.interface.base import Base
from .._storage.interface.place import Storage
from .._storage.locate import locate
from .._types import PathLike


_MOST = 4


class KnownBases:
    """The last bases, each for as long as the same checkpoint is at its place."""

    def __init__(self) -> None:
        self._lock = ForkedLock()
        self._bases: OrderedDict[tuple[str, object], Base] = OrderedDict()

    def find(self, path: PathLike, target: Storage) -> Base:
        """The base at a path for a save to a target; raise if it can be none."""
        place = locate(path)
        key = _key(place)
        with self._lock.own:
            base = self._bases.get(key)
        if base is None or target.why_apart(place):
            base = base_at(path, target)
            if _key(place) == key:
                self.remember(place, base)
        return base

    def remember(self, place: Storage, base: Base) -> None:
        """Note the base that is at a place now, if that can be seen."""
        try:
            key = _key(place)
        except (OSError, CheckpointError):
            return  # It was saved: what fails here is no failure of that.
        with self._lock.own:
            self._bases[key] = base
            self._bases.move_to_end(key)
            while len(self._bases) > _MOST:
                self._bases.popitem(last=False)


def _key(place: Storage) -> tuple[str, object]:
    return place.url(), place.identity()


known_bases = KnownBases()
