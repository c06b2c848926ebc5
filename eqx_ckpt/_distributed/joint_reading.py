"""One checkpoint, restored by several processes that read the same version."""

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any
from zlib import crc32

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, Sharding

from .._errors import CheckpointError, CheckpointNotFoundError, LeafMismatchError
from .._format.leaf_names import below, encode
from .._format.source import Source
from .._sources.consistent_read import OF_TWO_VERSIONS, Reading, Replaced
from .._tree.leaves.key_paths import key_paths, typed
from .._tree.leaves.leaf_kinds import describe_like, is_key
from .._tree.leaves.transient import stop_at_transients
from .._tree.matching.sharding_argument import targets_of
from .._tree.plans.read_plan import ReadPlan, Request
from .._tree.transform.transform_parts import Part, Read
from .._types import as_text, PathLike
from .call_matching import one_for_all
from .jax_service import is_alone, service
from .meeting import circle_of
from .process_errors import from_json, to_json, verdict
from .process_group import digest_of, Group, Solo


_NOT_FOUND = CheckpointNotFoundError.__name__


class JointReading(Reading):
    """A reading by all processes that read parts of the same arrays, or by one alone.

    They agree on the version and on their plans before they read, and whether all have
    read it afterwards. What fails on one of them is raised on all.
    """

    def __init__(
        self,
        source: PathLike | Source,
        request: Request,
        timeout: float,
        *,
        broadcast_replicas: bool,
    ) -> None:
        super().__init__(source)
        self._is_alone = is_alone()
        place = source if isinstance(source, Source) else as_text(source)
        option = ", broadcast_replicas=True" if broadcast_replicas else ""
        self._call = f"restore({place}{option})"
        self.request = request
        self._timeout = timeout
        self.broadcast_replicas = broadcast_replicas
        # What all processes must request in the same way, line by line, once there is a
        # plan.
        self._outline: list[str] = []
        self._members: set[int] | None = None
        self._group: Group | None = None
        self._round = 0
        # On the first process, what all saw last time, if that was not the same.
        self._versions: list[str | None] = []
        # Whether all know that this version is not read.
        self._is_given_up = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        if self._group is not None:
            self._group.close()

    def open(self) -> Source:
        self._is_given_up = False
        return super().open()

    def agree_on(self, plan: ReadPlan) -> None:
        """Raise unless all processes read this version, by plans that fit together."""
        if not self._is_alone:
            self._outline = outline_of(plan)
            if not self.broadcast_replicas:
                self._members = readers(plan.shardings)
            self.confirm()

    def confirm(self, error: Exception | None = None) -> None:
        if self._is_alone:
            super().confirm(error)
            return
        if error is not None and self._is_given_up:
            raise error
        version, has_changed = None, False
        try:
            if error is None or type(error) in OF_TWO_VERSIONS:
                has_changed = self.has_changed()
            version = self.digest() if error is None else None
        except Exception as e:
            error = e
        self._agree(version, error, has_changed=has_changed)

    def check_others(self) -> None:
        """Raise if another process failed, before or after all compute together."""
        if not self._is_alone:
            self._agree("", None, has_changed=False)

    def _agree(
        self, version: str | None, error: Exception | None, *, has_changed: bool
    ) -> None:
        """Raise unless all see the same version, and nothing failed on any process."""
        self._is_given_up = True
        said: dict[str, Any] = {
            "version": version,
            "has_changed": has_changed,
            "error": None if error is None else to_json(error),
            "plan": digest_of(self._outline),
        }
        self._round += 1
        try:
            group = self._meet() or Solo()
            found = group.combine(f"{self._round}", said, self._verdict)
        except CheckpointError as e:
            raise e from error
        if found["is_replaced"]:
            raise Replaced from error
        if error is not None:
            raise error
        if found["failed"]:
            index, failure = found["failed"]
            raise from_json(self._process(index), failure)
        if found["differ"]:
            raise self._different()
        self._is_given_up = False

    def _verdict(self, values: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """What the first process says of what all have seen.

        Raise if they see different places.
        """
        found = verdict(values) | {"is_replaced": False, "differ": False}
        failures = {i: v["error"] for i, v in enumerate(values) if v["error"]}
        if any(value["has_changed"] for value in values) and all(
            failure["kind"] in [kind.__name__ for kind in OF_TWO_VERSIONS]
            for failure in failures.values()
        ):
            return found | {"is_replaced": True}
        blind = [i for i in failures if failures[i]["kind"] == _NOT_FOUND]
        if blind and any(value["version"] is not None for value in values):
            raise self._seen_by_some(blind[0], failures)
        if failures:
            return found
        versions = [value["version"] for value in values]
        is_same = len({*versions}) == 1
        if not is_same and versions == self._versions:
            # If it had been replaced in between, all processes would see the new one
            # now.
            raise self._several_places(versions)
        self._versions = [] if is_same else versions
        differ = len({value["plan"] for value in values}) > 1
        return found | {"is_replaced": not is_same, "differ": differ}

    def _different(self) -> LeafMismatchError:
        assert self._group is not None
        return LeafMismatchError(
            "The processes do not restore the same:\n"
            + "\n".join(self._group.first_difference(self._outline))
            + "\nNothing was restored. All processes have to pass the same dtypes, "
            "shardings, `transform` and `filter_spec` for the arrays that they share, "
            "in trees of the same structure."
        )

    def _several_places(self, versions: list[str | None]) -> CheckpointError:
        other = next(i for i, v in enumerate(versions) if v != versions[0])
        return CheckpointError(
            f"Process {self._process(other)} sees a different checkpoint than process "
            f"{self._process(0)} in {self._call}. Nothing was restored. "
            f"{one_for_all('restore from')}"
        )

    def _seen_by_some(
        self, index: int, failures: Mapping[int, dict[str, Any]]
    ) -> CheckpointNotFoundError:
        assert self._group is not None
        sees = next(i for i in range(self._group.size) if i not in failures)
        return CheckpointNotFoundError(
            f"Process {self._process(index)} does not see, or not yet, the checkpoint "
            f"that process {self._process(sees)} sees in {self._call}: "
            f"{failures[index]['text']} Nothing was restored. "
            f"{one_for_all('restore from')}"
        )

    def _process(self, index: int) -> int:
        """The number of a process that reads."""
        assert self._group is not None
        return self._group.members[index]

    def _meet(self) -> Group | None:
        """The processes that read together; `None` if only this one."""
        if self._group is None:
            if self.broadcast_replicas:
                self._members = set(range(jax.process_count()))
            elif self._members is None:
                self._members = wanted_by(self.request)
            is_one = jax.process_index() in self._members and len(self._members) > 1
            everybody = len(self._members) == jax.process_count()
            if is_one and (everybody or service() is not None):
                circle = circle_of(tuple(sorted(self._members)))
                self._group = Group(circle, self._call, self._timeout)
        return self._group


def outline_of(plan: ReadPlan) -> list[str]:
    """A line for each array that several processes share, and how they compute it."""
    lines = [
        f"leaf {read.name!r}, {_of(read)}, on {_described(place)}"
        for read in plan.reads
        if readers([place := read.place.sharding or read.place.target])
    ]
    kept = {n: x for n, x in plan.kept.items() if hasattr(x, "sharding")}
    shared = {n: x for n, x in kept.items() if readers([x.sharding])}
    lines += [
        f"leaf {name!r}, {describe_like(x)}, which is not restored, on "
        f"{_described(x.sharding)}"
        for name, x in (kept if shared and plan.request.initialises else shared).items()
    ]
    return lines + [_computation(part) for part in plan.parts if part.is_shared]


def _of(read: Read) -> str:
    """What a leaf becomes, and where it comes from."""
    words = [str(read.becomes)]
    words += ["weakly typed"] if read.becomes.weak_type else []
    words += ["by a `filter_spec`"] if read.spec is not None else []
    if read.origin is not None and read.origin.names != (read.name,):
        words.append(f"made of {list(read.origin.names)}")
        words += [] if read.origin.value is None else [_digest(read.origin.value)]
    return ", ".join(words)


def _computation(part: Part) -> str:
    outputs = [read.name for read in part.outputs]
    inputs = [f"{r.name!r} on {_described(r.place.sharding)}" for r in part.inputs]
    constants = [_digest(value) for value in part.constants]
    done = f"{crc32(str(part.computation).encode()):08x}"
    return f"leaves {outputs} by the computation {done} of {inputs + constants}"


def _digest(value: Any) -> str:
    """The bytes of an array, or of the part of it that this process has."""
    if is_key(value):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return f"an array {value.dtype}{list(value.shape)}"
    return f"an array {crc32(np.ascontiguousarray(value).tobytes()):08x}"


def _described(place: Any) -> str:
    mesh = place if isinstance(place, Mesh) else getattr(place, "mesh", None)
    if not isinstance(mesh, Mesh):
        return str(place)
    axes = [f"{name}={mesh.shape[name]}" for name in mesh.axis_names]
    spec = getattr(place, "spec", "any PartitionSpec")
    kind = getattr(place, "memory_kind", None)
    devices = crc32(str([device.id for device in mesh.devices.flat]).encode())
    return f"a mesh of {', '.join(axes)} (devices {devices:08x}) as {spec}, {kind}"


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


def wanted_by(request: Request) -> set[int]:
    """The processes that will read, judged by the arguments of the restore."""
    like, is_leaf = request.like, stop_at_transients(request.is_leaf)
    try:
        leaves = key_paths(like, is_leaf)
        targets = targets_of(request.sharding, like, is_leaf, len(leaves))
    except Exception:
        # The error is raised later, when it can be sent to the processes of `like`.
        return readers(getattr(x, "sharding", None) for x in jtu.tree_leaves(like))
    return readers(
        _wanted(target, below(request.prefix, encode(typed(path))), leaf)
        for target, (path, leaf) in zip(targets, leaves, strict=True)
    )


def _wanted(target: Any, name: str, leaf: Any) -> Any:
    """Where a leaf of `like` is to go."""
    if not hasattr(leaf, "sharding"):
        return None
    if callable(target):
        try:
            target = target(name, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        except Exception:
            target = None
    return leaf.sharding if target is None else target
