"""A mirror of an incremental run: what did not change is not uploaded again."""

import pathlib
import random
import shutil
import uuid
from typing import Any

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, keep_last, Mirror
from faults.workloads import small_chunks
from helpers import assert_same
from stores.place import Place
from support import locate, open_kvstore


PATIENCE = 300.0  # seconds; longer than anything here takes
CHUNKS = 4
NAMES = "abc"


def chunks_below(path: str) -> dict[str, object]:
    """The chunks that are stored below a path: on a disk, with their inodes."""
    if "://" in path:
        keys = open_kvstore(locate(path).spec).list().result()
        return {_chunk(key.decode()): None for key in keys if b"/c." in key}
    files = pathlib.Path(path).rglob("c.*")
    return {_chunk(str(file)): file.stat().st_ino for file in files}


def _chunk(key: str) -> str:
    return "/".join(key.split("/")[-2:])


class Training:
    def __init__(
        self, run: pathlib.Path, there: str, chance: random.Random, *, shared: bool
    ) -> None:
        self.run, self.there, self.chance = run, there, chance
        self.shared = shared
        self.tree: dict[str, Any] = {name: np.zeros(4 * CHUNKS) for name in NAMES}
        self.tree["empty"] = np.zeros((0, 3))
        self.changed: set[str] = set()
        self.saved: dict[int, Any] = {}
        self.open()

    def open(self) -> None:
        mirror = Mirror(self.there, keep=keep_last(3))
        self.manager = CheckpointManager(
            self.run,
            keep=keep_last(2),
            incremental=True,
            mirror=mirror,
            shared=self.shared,
        )
        if self.saved:
            found = self.manager.restore(self.tree)
            assert_same(found, self.saved[max(self.saved)])

    def change(self) -> None:
        name, chunk = self.chance.choice(NAMES), self.chance.randrange(CHUNKS)
        self.tree[name][4 * chunk + self.chance.randrange(4)] += 1
        self.changed.add(f"{name}/c.{chunk}")

    def save(self) -> None:
        step = max(self.saved, default=0) + 1
        before = self.manager.mirrored()
        files = {
            inode
            for other in before
            for inode in chunks_below(f"{self.there}/{other:06}").values()
            if inode is not None
        }
        self.manager.save(step, self.tree).result(PATIENCE)
        assert self.manager.uploads()[step].result(PATIENCE) is None
        found = chunks_below(f"{self.there}/{step:06}")
        own = {chunk for chunk, inode in found.items() if inode not in files}
        if before:
            assert own == self.changed, step
        self.changed.clear()
        self.saved[step] = {name: array.copy() for name, array in self.tree.items()}

    def restart(self, *, loses_disk: bool) -> None:
        self.manager.close()
        if loses_disk:
            shutil.rmtree(self.run, ignore_errors=True)
        self.open()


@pytest.mark.once
@pytest.mark.parametrize(
    ("kind", "seed", "shared"),
    [
        ("disk", 0, True),
        ("disk", 1, True),
        ("disk", 3, False),
        ("memory", 0, True),
        ("memory", 1, True),
        ("s3", 2, True),
        ("s3", 4, False),
    ],
)
def test_only_what_changed_is_uploaded(
    tmp_path: pathlib.Path,
    request: pytest.FixtureRequest,
    kind: str,
    seed: int,
    shared: bool,
) -> None:
    there = str(tmp_path / "there")
    if kind != "disk":
        there = f"memory://{uuid.uuid4().hex}/run"
    if kind == "s3":
        place: Place = request.getfixturevalue("s3")
        there = place.url
    chance = random.Random(seed)
    with small_chunks(32):
        training = Training(tmp_path / "run", there, chance, shared=shared)
        for _ in range(25):
            what = chance.choice("change change save save restart lose".split())
            if what == "change":
                training.change()
            elif what == "save":
                training.save()
            else:
                training.restart(loses_disk=what == "lose")
        training.manager.close()
        alone = CheckpointManager(there)
        assert alone.steps() == sorted(training.saved)[-3:]
        for step in alone.steps():
            assert_same(alone.restore(training.tree, step), training.saved[step])
            assert eqx_ckpt.inspect.verify(alone._run.path(step))
