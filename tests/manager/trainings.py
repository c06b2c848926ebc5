"""Random trainings with damage, beside a model of what is there and what comes back.

A training saves, goes back, falls back from damage, deletes, repairs and forks. Its run
may have a mirror. The model says what is kept, uploaded, restored and refused.
"""

import contextlib
import functools as ft
import pathlib
import random
import re
import shutil
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import pytest

import eqx_ckpt
from eqx_ckpt import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointManager,
    CorruptCheckpointError,
    inspect,
    keep_best,
    keep_last,
    Mirror,
)
from helpers import assert_same, wait_for_uploads


PATIENCE = 300.0  # seconds; longer than anything here takes
KEEPS = (
    None,
    [keep_last(1)],
    [keep_last(2)],
    [keep_last(1), keep_best("loss", 1)],
    [keep_last(3)],
)
# A bit in the file itself, and so in each link; a bit in a copy that takes its place.
FLIPPED, REPLACED, LOST, MANIFEST = "flipped", "replaced", "lost", "manifest"
DAMAGE = (FLIPPED, FLIPPED, REPLACED, LOST, MANIFEST)
# A manager sees them without reading the data.
VISIBLE = (LOST, MANIFEST)
CALLS = (
    *("save", "save", "save", "save", "save", "restore", "restore", "resume", "open"),
    *("damage", "damage", "damage", "damage", "repair", "fork", "delete", "lose"),
)
# The newest steps of a mirror that are compared with those of the run.
COMPARED = 2


def state(value: int) -> Any:
    return {"w": jnp.full((5, 3), value), "frozen": jnp.arange(12.0), "value": value}


@dataclass(eq=False)
class Saved:
    """What a save has left; copies of it may be in several places."""

    step: int
    value: int
    metadata: Any
    run: object
    before: "Saved | None"

    def line(self) -> Iterator["Saved"]:
        """It, and those that it came from."""
        found: Saved | None = self
        while found is not None:
            yield found
            found = found.before


def are_of_one_line(a: Saved, b: Saved) -> bool:
    return a in b.line() or b in a.line()


@dataclass(eq=False)
class Place:
    """A run on a disk, as it should be.

    **Attributes:**

    - `damage`: what has happened to a step, if anything.
    - `seen`: what the manager has seen intact, and does not look at again.
    """

    path: pathlib.Path
    steps: dict[int, Saved] = field(default_factory=dict)
    damage: dict[int, str] = field(default_factory=dict)
    seen: set[Saved] = field(default_factory=set)

    def readable(self) -> dict[int, Saved]:
        """The steps with a manifest that can be read."""
        return {n: s for n, s in self.steps.items() if self.damage.get(n) != MANIFEST}

    def folder(self, step: int) -> pathlib.Path:
        return self.path / f"{step:06d}"

    def chunk(self, step: int, leaf: str) -> pathlib.Path:
        return self.folder(step) / leaf / ("c.0.0" if leaf == "w" else "c.0")

    def remove(self, step: int) -> None:
        del self.steps[step]
        self.damage.pop(step, None)

    def retain(
        self, keep: Any, saved: int, passed: Collection[int] = (), *others: int
    ) -> None:
        """Remove what `keep` does not keep, among what restores have not passed over.

        What is visibly damaged does not count, and stays.
        """
        if keep is None:
            return
        counted = set(self.steps).difference(passed)
        while True:
            kept = {saved, max(counted, default=saved), *others}
            metadata = {n: self.metadata(n) for n in sorted(counted)}
            for function in keep:
                kept.update(function(metadata))
                if "best" in function.__qualname__:
                    kept |= {n for n in counted if self.damage.get(n) == MANIFEST}
            removed = counted - kept
            if not removed:
                return
            looked_at = {n: self.steps[n] for n in kept & counted}
            bad = {
                n
                for n, found in looked_at.items()
                if self.damage.get(n) in VISIBLE and found not in self.seen
            }
            self.seen.update(looked_at[n] for n in looked_at.keys() - bad)
            if not bad:
                break
            counted -= bad
        for step in removed:
            self.remove(step)

    def metadata(self, step: int) -> Any:
        return None if self.damage.get(step) == MANIFEST else self.steps[step].metadata


class Training:
    """A manager and the model beside it, given the same calls."""

    def __init__(self, folder: pathlib.Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder = folder
        self.here = Place(folder / "run")
        has_mirror = self.random.random() < 0.6
        self.there = Place(folder / "there") if has_mirror else None
        self.places = [self.here, *([self.there] if self.there else [])]
        self.value = 0
        self.calls: list[str] = []
        self.manager: CheckpointManager | None = None
        self.open()

    def play(self, count: int) -> None:
        """Make random calls; check after each one."""
        try:
            for _ in range(count):
                getattr(self, self.random.choice(CALLS))()
                self.check()
        except BaseException as e:
            e.add_note("\n".join(self.calls))
            raise
        finally:
            self.close()

    def note(self, *words: Any) -> None:
        self.calls.append(" ".join(map(str, words)))

    def all(self) -> dict[int, Saved]:
        return {n: saved for place in self.places for n, saved in place.steps.items()}

    def open(self) -> None:
        """A new process of the training, which has restored nothing yet."""
        choice = self.random.choice
        self.close()
        # What was restored, and what was saved after it.
        self.at: Saved | None = None
        self.last: Saved | None = None
        self.newest_save: int | None = None
        self.passed: set[int] = set()
        self.is_tidy = True
        self.keep, self.keep_there = choice(KEEPS), choice(KEEPS)
        self.when = choice([None, None, []])
        for place in self.places:
            place.seen.clear()
        how: dict[str, Any] = {"incremental": choice([True, False])}
        how["compression"] = choice([None, "zstd"])
        if self.there:
            mirror = Mirror(self.there.path, keep=self.keep_there, when=self.when)
            how["mirror"] = mirror
        self.note("open", how, self.keep, self.keep_there, self.when)
        self.manager = CheckpointManager(self.here.path, keep=self.keep, **how)
        wait_for_uploads(self.folder)
        if self.there and self.when is None and self.here.steps:
            newest = max(self.here.steps)
            if newest > max(self.there.steps, default=-1):
                self.upload(newest)

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()

    def save(self) -> None:
        choice = self.random.choice
        came_from = self.last or self.at
        start = came_from.step if came_from else max(self.all(), default=0)
        step = start + choice([1, 5, 10, 10])
        again = sorted(n for n in self.here.steps if n > start)
        if again and choice([True, False]):
            step = choice(again)
        self.value += 1
        metadata = choice([None, {"loss": self.random.random()}])
        self.note("save", step, self.value, metadata)
        exists = step in self.here.steps and step not in self.passed
        if not self.is_tidy:
            self.make_room(step)
        self.is_tidy = not exists
        assert self.manager is not None
        if exists:
            with pytest.raises(CheckpointExistsError):
                self.manager.save(step, state(self.value), metadata=metadata)
            return
        self.manager.save(step, state(self.value), metadata=metadata).result(PATIENCE)
        run = came_from.run if came_from else self.run()
        saved = Saved(step, self.value, metadata, run, came_from)
        self.last, self.newest_save = saved, step
        self.here.steps[step] = saved
        self.here.damage.pop(step, None)
        self.passed.discard(step)
        self.here.retain(self.keep, step, self.passed)
        self.passed &= self.here.steps.keys()
        if self.there and self.when is None:
            is_there = self.upload(step)
            refused = pytest.raises(CheckpointError)
            with contextlib.nullcontext() if is_there else refused:
                self.manager.uploads()[step].result(PATIENCE)

    def run(self) -> object:
        """The run of a training that begins: that of the newest step here, if any."""
        found = self.here.readable()
        return found[max(found)].run if found else object()

    def make_room(self, step: int) -> None:
        whole = self.here.readable().keys() - self.passed
        if whole:
            spared = {step, self.newest_save} - {None}
            self.here.retain(self.keep, max(whole), self.passed, *spared)

    def upload(self, step: int) -> bool:
        """Whether a step comes to be in the mirror."""
        there = self.there
        assert there is not None
        saved = self.here.steps[step]
        if step in self.here.damage or there.damage.get(step) == MANIFEST:
            return False
        others = [found for found in there.readable().values() if found is not saved]
        is_taken = there.steps.get(step, saved) is not saved
        if is_taken or not all(are_of_one_line(saved, found) for found in others):
            return False
        if there.damage.get(step) in VISIBLE:
            del there.damage[step]
        there.steps[step] = saved
        there.retain(self.keep_there, step)
        return True

    def restore(self, on_damage: Any = None) -> None:
        """Restore the newest step, or any; the best copy if it is damaged."""
        choice = self.random.choice
        if not (steps := self.all()):
            return
        on_damage = on_damage or choice(["raise", "fallback"])
        step = choice([None, None, choice(sorted(steps))])
        self.note("restore", step, on_damage)
        assert self.manager is not None
        restore = ft.partial(self.manager.restore, state(0), step, on_damage=on_damage)
        if step is None and self.has_two_lines():
            with pytest.raises(CheckpointError, match="different histories"):
                restore()
            return
        copies = sorted(
            (n, -tier)
            for tier, place in enumerate(self.places)
            for n in place.steps
            if step in (None, n)
        )
        whole = [copy for copy in copies if copy[0] not in self.place(copy).damage]
        best = copies[-1]
        if not whole:
            way_out = "older steps is intact" if step is None else None
            with pytest.raises(CorruptCheckpointError, match=way_out):
                restore()
            return
        if whole[-1] != best:
            found = rf"(?s)tep {whole[-1][0]}\b"
            if on_damage == "raise":
                with pytest.raises(CorruptCheckpointError, match=f"{found}.*intact"):
                    restore()
                return
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                got = restore()
            assert any(re.search(found, str(w.message)) for w in caught)
            passed = copies[copies.index(whole[-1]) + 1 :]
            self.passed |= {n for n, tier in passed if tier == 0}
            best = whole[-1]
        else:
            got = restore()
        saved = self.place(best).steps[best[0]]
        assert_same(got, state(saved.value))
        if saved is not self.last:
            self.at, self.last = saved, None

    def place(self, copy: tuple[int, int]) -> Place:
        return self.places[-copy[1]]

    def resume(self) -> None:
        self.open()
        self.restore("fallback")

    def lose(self) -> None:
        """Another machine goes on, with what is in the mirror."""
        if self.there and self.random.random() < 0.5:
            self.close()
            self.note("lose")
            shutil.rmtree(self.here.path, ignore_errors=True)
            self.here.steps.clear()
            self.here.damage.clear()
            self.open()

    def has_two_lines(self) -> bool:
        """Whether the newest steps did not come from one another."""
        newest: list[Saved] = []
        for place in self.places:
            most = COMPARED if place is self.there else 1
            readable = place.readable()
            steps = sorted(place.steps)[-most:]
            newest += [readable[step] for step in steps if step in readable]
        return not all(are_of_one_line(a, b) for a in newest for b in newest)

    def delete(self) -> None:
        if self.all():
            step = self.random.choice([max(self.all()), *self.all()])
            self.note("delete", step)
            assert self.manager is not None
            self.manager.delete(step)
            for place in self.places:
                if step in place.steps:
                    place.remove(step)
            self.passed.discard(step)

    def damage(self) -> None:
        choice = self.random.choice
        place = choice([self.here, *self.places])
        whole = sorted(place.steps.keys() - place.damage.keys())
        if not whole:
            return
        step, kind = choice([max(whole), *whole]), choice(DAMAGE)
        chunk = place.chunk(step, choice(["w", "frozen"]))
        self.note(kind, chunk)
        place.damage[step] = kind
        if kind == MANIFEST:
            place.seen.discard(place.steps[step])
        if kind == FLIPPED:
            for other, n in self.linked(chunk):
                other.damage.setdefault(n, kind)
        spoil(place.folder(step) / "zarr.json" if kind == MANIFEST else chunk, kind)

    def linked(self, chunk: pathlib.Path) -> Iterator[tuple[Place, int]]:
        """The steps that share a file."""
        for place in self.places:
            for step in place.steps:
                other = place.chunk(step, chunk.parent.name)
                if other.exists() and other.samefile(chunk):
                    yield place, step

    def repair(self) -> None:
        """Copy a step that is intact over one that is damaged, in the other place."""
        for bad, good in zip(self.places, reversed(self.places), strict=True):
            for step in sorted(bad.damage):
                is_whole = step in good.steps and step not in good.damage
                if is_whole and good.steps[step] is bad.steps[step]:
                    self.note("repair", bad.folder(step))
                    eqx_ckpt.copy(good.folder(step), bad.folder(step), overwrite=True)
                    del bad.damage[step]

    def fork(self) -> None:
        if not self.all():
            return
        step = self.random.choice(sorted(self.all()))
        damage = next(p.damage.get(step) for p in self.places if step in p.steps)
        new = self.folder / "fork"
        self.note("fork", step, damage)
        assert self.manager is not None
        if damage in VISIBLE:
            with pytest.raises(CorruptCheckpointError):
                self.manager.fork(new, step)
            assert not CheckpointManager(new).steps()
        else:
            self.manager.fork(new, step)
            assert is_intact(new / f"{step:06d}") == (damage is None)
        shutil.rmtree(new, ignore_errors=True)

    def check(self) -> None:
        wait_for_uploads(self.folder)
        assert self.manager is not None
        assert self.manager.steps() == sorted(self.all())
        for place in self.places:
            assert CheckpointManager(place.path).steps() == sorted(place.steps)
            damaged = {n for n in place.steps if not is_intact(place.folder(n))}
            assert damaged == place.damage.keys()
        if not self.has_two_lines():
            assert self.manager.latest() == max(self.all(), default=None)


def is_intact(path: pathlib.Path) -> bool:
    try:
        inspect.verify(path)
    except CorruptCheckpointError:
        return False
    return True


def spoil(file: pathlib.Path, kind: str) -> None:
    """Damage a file in one of the ways above."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if kind == LOST:
        file.unlink()
    elif kind == FLIPPED:
        with open(file, "r+b") as f:
            f.write(data)
    else:
        before = file.parent.stat().st_ctime_ns
        # The clock of a file system may stand for milliseconds.
        while file.parent.stat().st_ctime_ns == before:
            file.unlink()
            file.write_bytes(data)
