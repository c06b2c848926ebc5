"""The versions of a checkpoint that a report compares: its columns."""

import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from .._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from .._format.source import read_or_note, RegionRead, Source
from .._lazy import Array
from .._sources.consistent_read import Reading
from .._steps.metrics_log import metrics_of
from .._steps.run_config import config_changes, Configs, read_config
from .._steps.run_steps import Run
from .._tree.matching.foreign_spelling import respelled
from .._types import PathLike


_REFUSED = (errno.EACCES, errno.EPERM, errno.EIO)


class Column:
    """One version: a step of a run, or one of two checkpoints.

    **Attributes:**

    - `label`: what the page calls it.
    - `manifest`: its own, but for the names that `call_as` has changed.
    - `has_checksums`: whether what was read was compared with any.
    - `damage`: what is wrong with leaves that were read, by name.
    - `unreadable`: why others could not be read, by name.
    - `path`, `reading`: where it is, and the version that was opened.
    """

    def __init__(self, label: str, path: PathLike | Source) -> None:
        self.label, self.path = label, path
        self.reading = Reading(path)
        self._source = self.reading.open()
        self.manifest = self._source.manifest
        self.has_checksums = self._source.has_checksums
        self.damage: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self._own: dict[str, str] = {}

    def call_as(self, other: "Column") -> None:
        """Call its leaves as another version does, if a format did not keep names."""
        self._own = respelled(other.manifest, self.manifest)
        names = {own: name for name, own in self._own.items()}
        leaves = {names.get(n, n): r for n, r in self.manifest.leaves.items()}
        self.manifest = replace(self.manifest, leaves=leaves)

    def read(self, reads: Sequence[RegionRead]) -> list[Array | None]:
        """The arrays of regions; `None` for those of leaves with a problem."""
        try:
            arrays: Sequence[Array | None] = self._read(reads)
        except OSError as e:
            if e.errno not in _REFUSED:
                raise
            arrays = [self._read_alone(read) for read in reads]
        found = zip(reads, arrays, strict=True)
        return [None if self.problem(r.name) else array for r, array in found]

    def _read(self, reads: Sequence[RegionRead]) -> list[Array]:
        if not self._own:
            return read_or_note(self._source, reads, self.damage)
        damage: dict[str, str] = {}
        own = [r._replace(name=self._own.get(r.name, r.name)) for r in reads]
        found = read_or_note(self._source, own, damage)
        names = {there.name: read.name for there, read in zip(own, reads, strict=True)}
        self.damage |= {names[name]: why for name, why in damage.items()}
        return found

    def _read_alone(self, read: RegionRead) -> Array | None:
        try:
            return self._read([read])[0]
        except OSError as e:
            if e.errno not in _REFUSED:
                raise
            self.unreadable[read.name] = str(e.strerror)
            return None

    def problem(self, name: str) -> str:
        """What a leaf is, in a word; nothing if all of it that was read is intact."""
        if name in self.damage:
            return "damaged"
        return "unreadable" if name in self.unreadable else ""

    def __str__(self) -> str:
        return str(self.reading)


class Problem(NamedTuple):
    """Why a step is missing, in sentences; and whether it may be intact."""

    text: str
    is_unreadable: bool = False


class Columns(NamedTuple):
    """What a report is about.

    **Attributes:**

    - `kind`: `"checkpoint"`, `"comparison"` or `"run"`.
    - `title`: the paths.
    - `found`: the versions, of which the last one is described in full.
    - `problems`: why steps are missing.
    - `metrics`: those of a run, by step, also of steps that have no column.
    - `own_bytes`: what each step of a run has for itself, as far as that is known.
    - `configs`: those of the versions that have one, by label.
    - `config_changes`: how that of a step differs from that of the step that it goes
        on from.
    """

    kind: str
    title: str
    found: list[Column]
    problems: list[Problem]
    own_bytes: Mapping[int, int] = MappingProxyType({})
    metrics: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    configs: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    config_changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


def find_columns(
    source: PathLike | Source, other: PathLike | Source | None, most: int
) -> Columns:
    """The checkpoint at a path, or the steps of the run there, at most so many."""
    if other is not None:
        pair = [_newest("A", source), _newest("B", other)]
        pair[0].call_as(pair[1])
        configs, problems = _configs(pair)
        title = f"{source} → {other}"
        return Columns("comparison", title, pair, problems, configs=configs)
    try:
        column = Column("", source)
    except CheckpointNotFoundError as e:
        run = _run_at(source)
        if run is None:
            raise e
        found, problems = _of_run(run, most)
        of_run = Configs([run.place])
        configs, of_configs = _configs(found, of_run)
        about = _own_bytes(run), metrics_of(run), configs
        histories = {
            int(column.label): column.manifest.history
            for column in found
            if column.label in configs
        }
        changed = config_changes(histories, of_run)
        by_label = {str(step): changes for step, changes in changed.items()}
        all_problems = problems + of_configs
        return Columns("run", str(source), found, all_problems, *about, by_label)
    configs, problems = _configs([column])
    return Columns("checkpoint", str(source), [column], problems, configs=configs)


def _configs(
    found: Sequence[Column], of_run: Configs | None = None
) -> tuple[dict[str, Mapping[str, Any]], list[Problem]]:
    """The configs of versions, by label, and why others cannot be read."""
    configs: dict[str, Mapping[str, Any]] = {}
    problems: dict[str, Problem] = {}
    for column in found:
        try:
            if of_run is not None:
                config = of_run.of(column.manifest.history)
            elif isinstance(column.path, Source):
                config = None
            else:
                config = read_config(column.path)
        except CheckpointNotFoundError:  # It is no step, but a recording, for example.
            continue
        except (CheckpointError, OSError) as e:
            problems[str(e)] = Problem(str(e))
            continue
        if config is not None:
            configs[column.label] = config
    return configs, [*problems.values()]


def _own_bytes(run: Run) -> dict[int, int]:
    try:
        return run.stored.own_bytes(run.readable_or_not())
    except CheckpointError:  # A step that cannot be read, which is named as such.
        return {}


def _run_at(path: PathLike | Source) -> Run | None:
    if isinstance(path, Source):
        return None
    run = Run(path)
    return run if run.readable_or_not() else None


def _newest(label: str, path: PathLike | Source) -> Column:
    """A checkpoint, or the newest step of a run."""
    try:
        return Column(label, path)
    except CheckpointNotFoundError:
        run = _run_at(path)
        if run is None:
            raise
        return Column(label, run.path(run.readable_or_not()[-1]))


def _of_run(run: Run, most: int) -> tuple[list[Column], list[Problem]]:
    found: list[Column] = []
    problems: list[Problem] = []
    for step in evenly(run.readable_or_not(), most):
        try:
            found.append(Column(str(step), run.path(step)))
        except CheckpointNotFoundError:
            problems.append(Problem(f"Step {step} is gone, or was never complete."))
        except CorruptCheckpointError as e:
            problems.append(Problem(f"Step {step} is damaged. {e}"))
        except (CheckpointError, OSError) as e:
            problems.append(Problem(f"Step {step} cannot be read. {e}", True))
    problems += [Problem(entry.problem) for entry in run.unusable()]
    if not found:
        listed = "\n".join(problem.text for problem in problems)
        raise CheckpointError(
            f"No step of {run.directory!r} can be read, so there is nothing to "
            f"report.\n{listed}"
        )
    return found, problems


def evenly(steps: Sequence[int], most: int) -> Iterator[int]:
    """At most so many of the steps, the first and the last one among them."""
    count = min(most, len(steps))
    last = len(steps) - 1
    places = {round(i * last / max(1, count - 1)) for i in range(count)}
    yield from (steps[last - place] for place in sorted(places, reverse=True))
