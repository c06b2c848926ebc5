"""Random trainings whose processes have disks of their own; run in all of them.

They save, go back, delete, and lose disks or parts of steps. After each call, all look
at what the disks and the mirror have. From that follows what the next call has to do.
"""

import itertools
import json
import pathlib
import random
import re
import shutil
import warnings
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import (
    CheckpointExistsError,
    CheckpointManager,
    CorruptCheckpointError,
    inspect,
)
from helpers import wait_for_uploads
from manager.trainings import FLIPPED, LOST, MANIFEST, REPLACED, spoil
from support import jax_service

from .programs import assert_same, shared, TIMEOUT


CALLS = (
    *("save", "save", "save", "save", "restore", "resume", "resume", "lose"),
    *("damage", "damage", "fall_back", "fall_back", "fall_back", "delete", "go_back"),
)
DAMAGE = (FLIPPED, REPLACED, LOST, MANIFEST)
# Where there are rows, each process has its own rows of these leaves, and no other has.
IN_ROWS = "rows", "frozen"
# The leaf of a part that says what the whole step has.
STEP = "step"
_WAIT = 60_000  # milliseconds


def state(value: int, *, has_rows: bool) -> dict[str, Any]:
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    mesh = Mesh(devices, ("x", "y"))

    def on_mesh(data: np.ndarray, spec: P) -> jax.Array:
        return shared(data.astype(np.float32), NamedSharding(mesh, spec))

    rows = P("x") if has_rows else P()
    return {
        "rows": on_mesh(np.arange(12).reshape(6, 2) + value, rows),
        "frozen": on_mesh(np.arange(18).reshape(6, 3), rows),
        "same": on_mesh(np.arange(5) + value, P()),
        "numpy": np.arange(4) + value,
        "value": value,
    }


class Part(NamedTuple):
    """What a disk has of a step.

    **Attributes:**

    - `value`: that of the state; `None` if it cannot be read any more.
    - `damaged`: the leaves of which a shard is damaged.
    """

    value: int | None
    damaged: list[str]


def part_at(path: pathlib.Path) -> Part:
    try:
        manifest = inspect.read_manifest(path)
    except CorruptCheckpointError:
        return Part(None, [])
    problem = ""
    try:
        inspect.verify(path)
    except CorruptCheckpointError as e:
        problem = str(e)
    names = {n.removeprefix("shards/") for n in manifest.leaves if n in problem}
    assert bool(names) == bool(problem), problem
    if STEP in names:
        return Part(None, [])
    leaves = {name.split("/")[0] for name in names}
    return Part(manifest.metadata["value"], sorted(leaves))


class Step(NamedTuple):
    """What all disks have of a step, and the mirror.

    **Attributes:**

    - `parts`: what each disk has, or `None`.
    - `mirrored`: the value that is in the mirror, or `None`.
    - `has_rows`: whether each process has to have its part.
    """

    parts: list[Part | None]
    mirrored: int | None
    has_rows: bool

    @property
    def value(self) -> int | None:
        """That of the parts which count, if any do; no two saves meet here."""
        values = {p.value for p in self.parts if p and p.value is not None}
        assert len(values) < 2
        return next(iter(values), None)

    @property
    def is_damaged(self) -> bool:
        return any(part and part.value is None for part in self.parts)

    @property
    def is_covered(self) -> bool:
        """Whether the disks have all that some of them lack."""
        there = [part is not None and part.value is not None for part in self.parts]
        return all(there) if self.has_rows else any(there)

    @property
    def is_local(self) -> bool:
        return self.is_covered or self.is_damaged

    @property
    def is_listed(self) -> bool:
        return self.is_local or self.mirrored is not None

    @property
    def is_intact(self) -> bool:
        """Whether each disk has an undamaged part."""
        found = self.value
        return found is not None and all(p == (found, []) for p in self.parts)

    @property
    def undamaged(self) -> int | None:
        """What a restore returns that accepts no damage; `None` if it raises."""
        if self.is_damaged or any(part and part.damaged for part in self.parts):
            return None
        return self.value if self.is_covered else self.mirrored

    @property
    def repaired(self) -> int | None:
        """What a restore returns that replaces what is damaged, if somebody has it."""
        if self.mirrored is not None:
            return self.mirrored
        for leaf in state(0, has_rows=self.has_rows):
            has = [
                p and p.value is not None and leaf not in p.damaged for p in self.parts
            ]
            if not (all(has) if self.has_rows and leaf in IN_ROWS else any(has)):
                return None
        return self.value


class Training:
    """A manager in each process; all of them make the same calls."""

    def __init__(self, place: str, seed: int) -> None:
        self.place, self.random = pathlib.Path(place, str(seed)), random.Random(seed)
        self.index, self.size = jax.process_index(), jax.process_count()
        self.disk = self.place / f"disk{self.index}"
        self.client = jax_service._client()
        self.topics = map(f"{self.place}/{{}}".format, itertools.count())
        choice = self.random.choice
        self.has_rows = choice([True, True, False])
        self.has_mirror = choice([True, False, False])
        self.due, self.keep = choice([1, 2]), choice([None, None, 1, 2, 3])
        self.value = 0
        self.calls: list[str] = []
        self.open()
        self.now = self.look()

    def play(self, count: int) -> None:
        """Make random calls; check after each one."""
        try:
            for _ in range(count):
                getattr(self, self.random.choice(CALLS))()
        except BaseException as e:
            e.add_note("\n".join([*self.calls, str(self.now)]))
            raise
        finally:
            self.manager.close()

    def note(self, *words: Any) -> None:
        self.calls.append(" ".join(map(str, words)))

    def state(self, value: int) -> dict[str, Any]:
        return state(value, has_rows=self.has_rows)

    def open(self) -> None:
        choice = self.random.choice
        how: dict[str, Any] = {"incremental": choice([True, False])}
        how["compression"] = choice([None, "zstd"])
        self.note("open", how, self.has_mirror and self.due, self.keep, self.has_rows)
        if self.has_mirror:
            when = eqx_ckpt.save_every_steps(self.due)
            how["mirror"] = eqx_ckpt.Mirror(self.place / "there", when=when)
        if self.keep:
            how["keep"] = eqx_ckpt.keep_last(self.keep)
        self.manager = CheckpointManager(
            self.disk, shared=False, timeout=TIMEOUT, **how
        )
        # The step that was saved or restored last, and newer ones that are damaged.
        self.last: int | None = None
        self.passed = set[int]()
        # By this manager.
        self.saved = set[int]()

    def tell(self, value: Any) -> list[Any]:
        """What each process says."""
        topic, client = next(self.topics), self.client
        client.key_value_set(f"{topic}/{self.index}", json.dumps(value))
        said = [f"{topic}/{index}" for index in range(self.size)]
        return [json.loads(client.blocking_key_value_get(key, _WAIT)) for key in said]

    def look(self) -> dict[int, Step]:
        """What is there of each step, in the eyes of all."""
        disks = self.tell({p.name: part_at(p) for p in self.disk.glob("[0-9]*")})
        parts = [
            {int(name): Part(*part) for name, part in disk.items()} for disk in disks
        ]
        steps = (self.place / "there").glob("[0-9]*")
        there = {int(step.name): part_at(step) for step in steps}
        assert not any(part.damaged for part in there.values())
        self.tell("has looked")
        found: dict[int, Step] = {}
        for n in sorted({*there}.union(*parts)):
            mirrored = there[n].value if n in there else None
            found[n] = Step([disk.get(n) for disk in parts], mirrored, self.has_rows)
        return found

    def listed(self) -> list[int]:
        return [n for n, step in self.now.items() if step.is_listed]

    def check(self, may: Callable[[int, Part | None, Part | None], bool]) -> None:
        """Look again: only what may change has changed, and all see the same steps."""
        wait_for_uploads(self.place)
        self.tell("uploads have ended")
        before, self.now = self.now, self.look()
        nothing = Step([None] * self.size, None, self.has_rows)
        for n in before.keys() | self.now.keys():
            pairs = zip(
                before.get(n, nothing).parts,
                self.now.get(n, nothing).parts,
                strict=True,
            )
            for old, new in pairs:
                assert old == new or may(n, old, new), (n, old, new)
        assert self.manager.latest() == max(self.listed(), default=None)

    def save(self) -> None:
        start = max(self.now, default=0) if self.last is None else self.last
        step = start + self.random.choice([1, 1, 2, 3])
        newer = [n for n in self.now if n > start]
        if newer and self.random.random() < 0.7:
            step = self.random.choice(newer)
        self.value += 1
        self.note("save", step, self.value)
        before = self.now.get(step)
        exists = before is not None and before.is_local and step not in self.passed
        metadata = {"value": self.value}
        goes = self.not_kept([] if exists else [step])
        useless = {n for n, found in self.now.items() if not found.is_local}
        if exists:
            with pytest.raises(CheckpointExistsError):
                self.manager.save(step, self.state(self.value), metadata=metadata)
            self.check(lambda n, old, new: new is None and n in goes)
            return
        saving = self.manager.save(step, self.state(self.value), metadata=metadata)
        saving.result(TIMEOUT)
        self.last = step
        self.saved.add(step)
        self.passed.discard(step)
        self.check(lambda n, old, new: n == step or (new is None and n in goes))
        assert self.now[step].is_intact
        assert self.now[step].value == self.value
        if self.has_mirror and step % self.due == 0:
            assert self.now[step].mirrored == self.value
        parts = {n: found.parts for n, found in self.now.items()}
        assert not any(any(parts.get(n, [])) for n in useless - self.saved)
        if self.keep:
            assert all(found[0] or not any(found) for found in parts.values())
            intact = {n for n, found in self.now.items() if found.is_intact}
            assert len(intact - self.passed) <= self.keep

    def not_kept(self, new: Collection[int]) -> set[int]:
        """The steps of which a save may remove parts.

        Nobody can complete them; or `keep` does not keep them, or process 0 has none.
        """
        useless = {n for n, step in self.now.items() if not step.is_covered}
        if not self.keep:
            return useless
        local = {n for n, step in self.now.items() if step.is_local and step.parts[0]}
        kept = sorted(local - self.passed | {*new})[-self.keep :]
        return useless | {n for n in self.now if n not in kept}

    def restore(self, on_damage: Any = None, number: int | None = None) -> None:
        on_damage = on_damage or self.random.choice(["raise", "fallback"])
        if not (listed := self.listed()):
            return
        self.note("restore", number, on_damage)
        candidates = listed if number is None else [number]
        best = candidates[-1]
        if on_damage == "raise":
            values = {best: self.now[best].undamaged}
        else:
            values = {n: self.now[n].repaired for n in candidates}
        whole = [n for n, value in values.items() if value is not None]

        def is_better(n: int, old: Part | None, new: Part | None) -> bool:
            """What is there stays; what was lost or damaged may be replaced."""
            if new is None:
                return False
            return old is None or old.value is None or {*new.damaged} < {*old.damaged}

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restore = self.manager.restore
            if not whole:
                with pytest.raises(CorruptCheckpointError):
                    restore(self.state(0), number, on_damage=on_damage)
                self.check(is_better)
                return
            tree = restore(self.state(0), number, on_damage=on_damage)
        chosen = whole[-1]
        assert_same(tree, self.state(values[chosen]))
        if chosen != best:
            said = "\n".join(str(w.message) for w in caught)
            assert re.search(rf"step {chosen} was restored", said)
        self.last = chosen
        if number is None:
            self.passed = {n for n in listed if n > chosen}
        has_part = self.now[chosen].value is not None
        self.check(is_better)
        assert self.now[chosen].is_intact or not has_part

    def go_back(self) -> None:
        """Look at any step; the training goes on from the newest one."""
        if listed := self.listed():
            self.restore(number=self.random.choice(listed))
            self.restore("fallback")

    def fall_back(self) -> None:
        """Go on after damage, and come to the same steps again."""
        self.damage()
        self.restore("fallback")
        self.save()

    def resume(self) -> None:
        self.lose(0.0)

    def lose(self, chance: float = 0.4) -> None:
        """New processes go on; some of them have a new disk."""
        lost = [i for i in range(self.size) if self.random.random() < chance]
        self.note("lose", lost)
        self.manager.close()
        if self.index in lost:
            shutil.rmtree(self.disk, ignore_errors=True)
        self.tell("lost")
        self.open()
        self.now = self.look()
        self.check(lambda n, old, new: False)
        self.restore("fallback")

    def delete(self) -> None:
        if listed := self.listed():
            step = self.random.choice([listed[-1], *listed])
            self.note("delete", step)
            self.manager.delete(step)
            self.passed.discard(step)
            self.check(lambda n, old, new: n == step)
            assert step not in self.now

    def damage(self) -> None:
        choice, who = self.random.choice, self.random.randrange(self.size)
        steps = [n for n, step in self.now.items() if step.parts[who]]
        if not steps:
            return
        step, kind = choice([steps[-1], *steps]), choice(DAMAGE)
        where = self.random.random()
        self.note(kind, step, "on disk", who)
        if who == self.index:
            damage(self.disk / f"{step:06d}", kind, where)
        self.tell("damaged")
        self.now = self.look()


def damage(step: pathlib.Path, kind: str, where: float) -> None:
    """Damage the manifest of a part, or one of its chunks, if any are left."""
    file, chunks = step / "zarr.json", sorted(step.rglob("c.*"))
    if kind != MANIFEST and chunks:
        file = chunks[int(where * len(chunks))]
    spoil(file, kind)


def play(place: str, seeds: Collection[int], count: int) -> None:
    for seed in seeds:
        Training(place, seed).play(count)
