"""One checkpoint, restored by several processes that read the same version."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, Sharding
from jaxtyping import PyTree

from .._errors import CheckpointError
from .._format.source import Source
from .._storage.reading import OF_TWO_VERSIONS
from .._types import as_text, PathLike
from .coordination import is_alone, service
from .group import Group
from .meeting import circle_of, from_json, to_json


class JointReading:
    """The agreement of processes that read parts of the same arrays.

    `guess` finds these processes while there is no plan, see `readers`.
    """

    def __init__(
        self, source: PathLike | Source, deadline: float, guess: Callable[[], set[int]]
    ) -> None:
        self.is_alone = is_alone()
        self.members: set[int] | None = None
        place = source if isinstance(source, Source) else as_text(source)
        self._call = f"restore({place})"
        self._deadline = deadline
        self._guess = guess
        self._group: Group | None = None
        self._round = 0

    def agree(
        self,
        version_here: Callable[[], str],
        has_changed: bool,
        error: Exception | None,
    ) -> bool:
        """Whether all see the same checkpoint; a failure on one is raised on all."""
        version = None
        try:
            version = version_here() if error is None else None
        except Exception as e:
            error = e
        told = None if error is None else to_json(error)
        said: dict[str, Any] = {
            "version": version,
            "has_changed": has_changed,
            "error": told,
        }
        self._round += 1
        try:
            group = self._meet()
            values = [said] if group is None else group.gather(f"{self._round}", said)
        except CheckpointError as e:
            raise e from error
        failures = {
            i: value["error"]
            for i, value in enumerate(values)
            if value["error"] is not None
        }
        if any(value["has_changed"] for value in values) and all(
            failure["kind"] in [kind.__name__ for kind in OF_TWO_VERSIONS]
            for failure in failures.values()
        ):
            return False
        if error is not None:
            raise error
        for i, failure in failures.items():
            raise from_json(sorted(self.members or ())[i], failure)
        return all(value["version"] == values[0]["version"] for value in values)

    def check(self, error: Exception | None) -> None:
        """Raise what failed on any process, before they compute together."""
        self.agree(lambda: "", False, error)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def _meet(self) -> Group | None:
        """The processes that read together, by the plan; `None` if only this one."""
        if self._group is None:
            if self.members is None:
                self.members = self._guess()
            is_one = jax.process_index() in self.members and len(self.members) > 1
            everybody = len(self.members) == jax.process_count()
            if is_one and (everybody or service() is not None):
                circle = circle_of(tuple(sorted(self.members)))
                self._group = Group(circle, self._call, self._deadline)
        return self._group


def everybody() -> set[int]:
    return set(range(jax.process_count()))


def readers(places: Iterable[Any]) -> set[int]:
    """The processes of those shardings and meshes that span several processes."""
    found: set[int] = set()
    for place in places:
        devices: Iterable[Any] = ()
        if isinstance(place, Mesh):
            devices = place.devices.flat
        elif isinstance(place, Sharding) and not isinstance(
            getattr(place, "mesh", None), AbstractMesh
        ):
            devices = place.device_set
        processes = {device.process_index for device in devices}
        found |= processes if len(processes) > 1 else set()
    return found


def wanted_by(like: PyTree, sharding: PyTree) -> set[int]:
    """The processes that will read, judged by the arguments of the restore."""
    if sharding is not None:
        return readers(jtu.tree_leaves(sharding, lambda x: isinstance(x, Mesh)))
    return readers(getattr(leaf, "sharding", None) for leaf in jtu.tree_leaves(like))
