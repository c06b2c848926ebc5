"""The directory of a training run: which steps are in it."""

import contextlib
import logging
import operator
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ._errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from ._format.manifest import MANIFEST
from ._retention import check_mode, Keep, Mode, ranked
from ._storage.bucket import ATTEMPT, Debris, remove_checkpoint
from ._storage.checkpoint import being_read, identity, is_checkpoint, read_metadata
from ._storage.directory import remove, sweep
from ._storage.foreign import instead_of_a_run
from ._storage.key_values import check_bucket, list_keys
from ._storage.kvstore import KvSpec, locate, shown, url
from ._storage.url import Store
from ._types import PathLike


logger = logging.getLogger("eqx_ckpt")
# Manifests that are read from a store at a time.
_AT_ONCE = 16
# Of what was passed as a step, so many characters are shown.
_LONGEST = 80
_STEP = re.compile(r"[0-9]{6}|[1-9][0-9]{6,18}")


def as_step(value: Any) -> int:
    """A step as an `int`; NumPy and JAX have integers of their own."""
    try:
        is_bool = isinstance(value, bool | np.bool_)
        step = -1 if is_bool else operator.index(value)
    except TypeError:
        step = -1
    if not 0 <= step < 2**63:
        raise CheckpointError(
            f"{in_words(value)} is no step. Pass a non-negative integer below 2**63."
        )
    return step


def in_words(step: Any) -> str:
    """What was passed as a step, whatever it is, and the same for equal integers."""
    try:
        text = repr(step) if isinstance(step, str) else str(step)
    except ValueError:  # Python does not write integers of more than 4300 digits.
        text = f"this `{type(step).__name__}`"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


class Run:
    """What the disk says; nothing is remembered that could become wrong."""

    def __init__(self, directory: PathLike) -> None:
        self._base = locate(directory)
        self._place = directory
        self.directory = url(self._base) or "/"
        self._metadata: dict[int, tuple[object, Any]] = {}

    def path(self, step: int) -> PathLike:
        if isinstance(self._place, Store):
            return self._place / f"{step:06d}"
        return f"{self.directory}/{step:06d}"

    def named(self) -> list[int]:
        """What has the name of a step, in order."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if _STEP.fullmatch(name))

    def steps(self) -> list[int]:
        """The steps that are saved, in order, damaged or not."""
        named = self.named()
        steps = [step for step in named if is_checkpoint(self.base(step))]
        # Another process may have removed one since, after it had saved a newer one.
        vanished = len(steps) < len(named) and not {*named} <= {*self.named()}
        return self.steps() if vanished else steps

    def latest(self) -> int | None:
        newest = max(self.steps(), default=None)
        if newest is None and (found := self.instead()):
            warnings.warn(
                f"There is no step in {self.directory!r}. {found}", stacklevel=2
            )
        return newest

    def instead(self) -> str:
        """What the directory is, if it can be no run."""
        return instead_of_a_run(self._base)

    def metadata(self, step: int) -> Any:
        """The metadata of a step; read again only if another step is in its place."""
        base = self.base(step)
        now = identity(base)
        if step not in self._metadata or self._metadata[step][0] != now:
            self._metadata[step] = now, read_metadata(base)[1]
        return self._metadata[step][1]

    def base(self, step: int) -> KvSpec:
        return {**self._base, "path": f"{self._base['path']}{step:06d}/"}

    def missing(self, step: int) -> CheckpointNotFoundError:
        there = ", ".join(map(str, self.steps())) or "none"
        return CheckpointNotFoundError(
            f"No committed checkpoint at {shown(self.base(step))}. The steps there are "
            f"{there}."
        )

    def idle(self, step: int) -> int:
        """The step; raises if this process is reading it."""
        if self.is_read(step):
            raise CheckpointError(
                f"Step {step} is being read, and was not deleted. Delete it when that "
                "has ended."
            )
        return step

    def is_read(self, step: int) -> bool:
        """Whether this process is reading a step."""
        return self.base(step)["path"] in being_read

    def delete(self, step: int) -> None:
        if step not in self.steps():
            raise self.missing(step)
        self.remove([step])

    def remove(self, steps: Sequence[int]) -> None:
        """Remove steps; none of them is ever half there."""
        remove(os.fspath(self.path(step)) for step in steps)

    def sweep(self, *, starting: bool) -> None:
        """Remove what dead attempts have left; on a disk, once is enough."""
        if starting:
            with contextlib.suppress(FileNotFoundError):
                sweep(self.directory)

    def clean_up(self) -> None:
        """Remove what dead saves have left, if that is allowed."""
        try:
            self.sweep(starting=True)
        except (OSError, CheckpointError) as e:
            # Whoever may only read, or has no locks there, can still restore.
            logger.warning("Could not clean up in %s: %s", self.directory, e)

    def newest_except(self, damaged: set[int]) -> int | None:
        """The newest step that is not known to be damaged; `None` if there is none."""
        return max({*self.steps()} - damaged, default=None)

    def best(self, metric: str, mode: Mode) -> int:
        """The step whose metric is best; raises if no step has it."""
        check_mode(mode)
        steps = {step: self.metadata(step) for step in self.steps()}
        best = ranked(steps, metric, mode)
        if not best:
            raise CheckpointNotFoundError(
                f"None of the {len(steps)} steps in {self.directory!r} has a number "
                f"{metric!r} in its metadata. Save it there: "
                f"`metadata={{{metric!r}: float(value)}}`."
            )
        return best[0]


class StoreRun(Run):
    """As `Run`, in an object store: there, one list of all keys says what there is."""

    def __init__(self, directory: PathLike) -> None:
        super().__init__(directory)
        self._debris = Debris(self._base)
        # By step, in the last list of all keys: the attempts, the metadata or what is
        # wrong with them; and by root, what is remembered for the next list.
        self._attempts: dict[int, set[str]] = {}
        self._found: dict[int, Any] = {}
        self._by_root: dict[str, Any] = {}

    def named(self) -> list[int]:
        return sorted(self._named())

    def _named(self) -> dict[int, bool]:
        """The steps that have a manifest, and whether it has data of its own."""
        found: list[int] = []
        attempts: dict[int, set[str]] = {}
        everything = list_keys(self._base)
        if not everything:
            check_bucket(self._base)
        for key in everything:
            step, _, rest = key.partition("/")
            if not _STEP.fullmatch(step):
                continue
            if rest == MANIFEST:
                found.append(int(step))
            elif root := ATTEMPT.match(rest):
                attempts.setdefault(int(step), set()).add(root[0])
        self._attempts = {step: attempts.get(step, set()) for step in found}
        known = self._by_root.copy()
        self._by_root = {
            root: known[root]
            for roots in self._attempts.values()
            for root in roots
            if root in known
        }
        # If another attempt is there too, the manifest may be of that one by now.
        self._found = {
            step: known[root]
            for step, roots in self._attempts.items()
            for root in roots
            if len(roots) == 1 and root in known
        }
        return {step: bool(roots) for step, roots in self._attempts.items()}

    def metadata(self, step: int) -> Any:
        """As of the last list of steps; those of all of them are read at once."""
        found = self._found
        if step not in found:
            missing = {step, *self._attempts} - found.keys()
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                reading = {step: pool.submit(self._read, step) for step in missing}
                try:
                    found.update({step: r.result() for step, r in reading.items()})
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
        if isinstance(found[step], CheckpointError):
            raise found[step]
        return found[step]

    def _read(self, step: int) -> Any:
        try:
            root, metadata = read_metadata(self.base(step))
        except CheckpointError as e:
            return e
        if root:
            self._by_root[root] = metadata
        return metadata

    def steps(self) -> list[int]:
        named = self._named()
        # A manifest without data is one that was copied here, or something else.
        return sorted(
            step
            for step, has_data in named.items()
            if has_data or is_checkpoint(self.base(step))
        )

    def remove(self, steps: Sequence[int]) -> None:
        for step in steps:
            try:
                remove_checkpoint(self.base(step))
            except CorruptCheckpointError as e:
                # The step is gone, and a sweep will find its data.
                logger.warning("Could not delete all of step %d: %s", step, e)

    def sweep(self, *, starting: bool) -> None:
        self._debris.sweep()


def run_at(directory: PathLike) -> Run:
    is_on_disk = locate(directory)["driver"] == "file"
    return Run(directory) if is_on_disk else StoreRun(directory)


class Candidates(Mapping[int, Any]):
    """The metadata of the steps that may be removed, read when they are asked for.

    **Attributes:**

    - `unreadable`: the steps whose metadata were asked for, and cannot be read.
    """

    def __init__(self, run: Run, without: set[int]) -> None:
        self._run = run
        steps = (step for step in run.steps() if step not in without)
        self._steps = dict.fromkeys(steps)
        self.unreadable: set[int] = set()

    def __getitem__(self, step: int) -> Any:
        if step not in self._steps:
            raise KeyError(step)
        try:
            return self._run.metadata(step)
        except (CorruptCheckpointError, CheckpointNotFoundError) as e:
            # It cannot be told to be worse, so it stays.
            logger.warning("The metadata of step %d cannot be read: %s", step, e)
            self.unreadable.add(step)
            return None

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def _chosen(answer: Any) -> list[int]:
    """The steps that a function has chosen; raises if that is anything else."""
    try:
        return [as_step(step) for step in answer]
    except (TypeError, CheckpointError) as e:
        raise CheckpointError(
            f"`keep` returned {answer!r}. It has to return steps, as integers. No step "
            "was removed."
        ) from e


def retain(run: Run, keep: Sequence[Keep], damaged: set[int], saved: int) -> None:
    """Remove the steps that nothing keeps, now that `saved` is there."""
    try:
        removed = _superfluous(run, keep, damaged, saved)
        run.remove(removed)
        run.sweep(starting=False)
    except Exception as e:
        e.add_note(f"Step {saved} was saved. Removing older steps failed.")
        raise
    for step in removed:
        logger.info("Removed %s.", run.path(step))


def _superfluous(
    run: Run, keep: Sequence[Keep], damaged: set[int], saved: int
) -> list[int]:
    steps = Candidates(run, damaged)
    kept = {saved, max(steps, default=saved)}
    for function in keep:
        kept.update(_chosen(function(steps)))
    kept |= steps.unreadable
    return [step for step in steps if step not in kept and not run.is_read(step)]
