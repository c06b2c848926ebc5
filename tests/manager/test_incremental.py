"""The steps of a run share what is equal, and any of them can be deleted."""

import functools as ft
import os
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P

from eqx_ckpt import CheckpointManager, CorruptCheckpointError, inspect, keep_last
from faults.workloads import small_chunks
from helpers import assert_same

from .looking import as_on, looked_at, PLACES


WIDTH = 4  # chunks of each array


class Pair:
    """Two managers of a run, a training, and what its steps have to be."""

    def __init__(self, run, frozen):
        self.run = run
        self.frozen = frozen
        keys = jax.random.split(jax.random.key(0), 8)
        self.tree = {
            "a": np.zeros(16),
            "b": jnp.zeros(16),
            "c": jnp.ones(3),
            "keys": jax.device_put(keys, ROWS),
            "rows": jax.device_put(np.arange(16, dtype=np.int8), ROWS),
        }
        self.steps = {}
        self.inodes = {}
        self.number = 0
        self.managers = [self.made(), self.made()]

    def made(self):
        return CheckpointManager(self.run, incremental=True, frozen=self.frozen)

    def save(self, who):
        self.number += 1
        with small_chunks(128 // WIDTH):
            self.managers[who].save(self.number, self.tree).result()
        self.steps[self.number] = jax.tree.map(kept, self.tree)

    def do(self, what, of):
        if what == "change a chunk in place":
            self.tree["a"][of % 16] += 1
        elif what == "change a chunk":
            self.tree["b"] = self.tree["b"].at[of % 16].add(1)
        elif what == "donate a part":
            # The old array is deleted; the new one may be in its memory.
            self.tree["b"] = _add(self.tree["b"], of // 16)
        elif what == "new arrays of NumPy's memory":
            self.tree["b"] = jnp.array(np.asarray(self.tree["b"]) + of % 2)
        elif what == "make it anew":
            self.tree = jax.tree.map(lambda x: x.copy(), self.tree)
        elif what == "donate all of it":
            # Each is a new object in the old memory.
            host = {"a": self.tree.pop("a")}
            self.tree = jax.tree.map(_passed, self.tree) | host
        elif what == "flip a bit":
            self.tree["rows"] = changed(self.tree["rows"], flip, of)
        elif what == "swap two":
            self.tree["rows"] = changed(self.tree["rows"], swap, of)
        elif what == "permute keys":
            data = np.roll(jax.random.key_data(self.tree["keys"]), of % 8, axis=0)
            self.tree["keys"] = jax.device_put(jax.random.wrap_key_data(data), ROWS)
        elif what == "another mesh":
            rows = self.tree["rows"]
            place = ROWS if rows.sharding == COLUMN else COLUMN
            self.tree["rows"] = jax.device_put(rows, place)
        elif what == "save":
            self.save(of % 2)
        elif what == "start again":
            self.managers[of % 2] = self.made()
        elif what == "delete" and self.steps:
            step = sorted(self.steps)[of % len(self.steps)]
            self.managers[of % 2].delete(step)
            del self.steps[step]

    def check(self):
        assert self.managers[0].steps() == sorted(self.steps)
        for step, tree in self.steps.items():
            assert inspect.verify(f"{self.run}/{step:06d}")
            assert_same(self.managers[0].restore(tree, step), tree)
        self.check_what_each_has_for_itself()
        self.check_that_no_file_was_written_again()

    def check_what_each_has_for_itself(self):
        files = {}
        for step in self.steps:
            for path in (self.run / f"{step:06d}").rglob("*"):
                if path.is_file():
                    files.setdefault(path.stat().st_ino, []).append((step, path))
        own = dict.fromkeys(self.steps, 0)
        for (step, path), *others in files.values():
            own[step] += 0 if others else path.stat().st_size
        assert inspect.own_bytes(self.run) == own

    def check_that_no_file_was_written_again(self):
        found = {}
        for step in self.steps:
            for path in (self.run / f"{step:06d}").rglob("*"):
                if path.is_file():
                    status = path.stat()
                    about = status.st_mtime_ns, path.read_bytes()
                    found[status.st_ino] = about, status.st_nlink
        for inode in found.keys() & self.inodes.keys():
            assert found[inode][0] == self.inodes[inode][0]
        self.inodes = found


@ft.partial(jax.jit, donate_argnums=0)
def _add(array, number):
    return array + number


@ft.partial(jax.jit, donate_argnums=0)
def _passed(array):
    return array


MESH = jax.make_mesh((8,), ("x",))
ROWS, COLUMN = NamedSharding(MESH, P("x")), NamedSharding(MESH, P())


def kept(leaf):
    """A copy that nothing changes."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.array(jax.random.key_data(leaf)))
    return np.array(leaf)


def changed(array, how, of):
    """A new array in the same place."""
    host = np.array(array)
    how(host, of % 16)
    return jax.device_put(host, array.sharding)


def flip(host, at):
    host[at] ^= 1 << at % 8


def swap(host, at):
    host[[at, at - 1]] = host[[at - 1, at]]


CALLS = [
    "donate a part",
    "new arrays of NumPy's memory",
    "change a chunk in place",
    "change a chunk",
    "make it anew",
    "donate all of it",
    "flip a bit",
    "swap two",
    "permute keys",
    "another mesh",
    "save",
    "save",
    "save",
    "start again",
    "delete",
]


FROZEN = [
    None,
    True,
    lambda leaf: leaf.ndim == 1,
    {"a": True, "b": True, "c": False, "keys": eqx.is_array, "rows": True},
]


@pytest.mark.once
@settings(max_examples=30)
@given(
    place=st.sampled_from(PLACES),
    frozen=st.sampled_from(FROZEN),
    calls=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 31)), max_size=16),
)
def test_any_deletion_in_any_order(tmp_path_factory, place, frozen, calls):
    pair = Pair(tmp_path_factory.mktemp("run"), frozen)
    with as_on(place):
        pair.save(0)
        for what, of in calls:
            pair.do(what, of)
            if what in ("save", "delete"):
                pair.check()


def test_a_step_takes_what_has_changed(tmp_path):
    tree = {"frozen": np.random.default_rng(0).random(100_000), "n": jnp.zeros(4)}
    with CheckpointManager(tmp_path, incremental=True, keep=keep_last(2)) as manager:
        for step in range(5):
            tree["n"] = tree["n"] + 1
            manager.save(step, {**tree, "frozen": tree["frozen"].copy()}).result()
        assert manager.steps() == [3, 4]
        for step in (3, 4):
            assert inspect.own_bytes(tmp_path)[step] < 2000
            assert_same(manager.restore(tree)["frozen"], tree["frozen"])


def test_it_goes_on_with_the_steps_of_an_earlier_manager(tmp_path):
    tree = {"w": np.arange(9.0), "v": np.arange(5)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, tree)
    with CheckpointManager(tmp_path, incremental=True) as manager:
        manager.save(2, tree)
    files = [f"{n}/{k}" for n in tree for k in ("c.0", "zarr.json")]
    for name in files:
        assert (tmp_path / "000001" / name).samefile(tmp_path / "000002" / name)


@pytest.mark.parametrize("what", ["the manifest", "the folder"])
def test_a_newest_step_that_cannot_be_read(tmp_path, what, caplog):
    tree = {"w": np.arange(9.0)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, tree)
    if what == "the manifest":
        os.truncate(tmp_path / "000001/zarr.json", 300)
    else:
        shutil.rmtree(tmp_path / "000001/w")
    with CheckpointManager(tmp_path, incremental=True) as manager:
        manager.save(2, tree).result()
        assert_same(manager.restore(tree, 2), tree)
    assert ("Nothing is shared with step 1" in caplog.text) == (what == "the manifest")


def test_a_file_that_was_damaged_is_written_again(tmp_path):
    """Also if the manager that wrote it saves the next step."""
    tree = {"w": np.arange(9.0), "v": np.arange(9.0)}
    with CheckpointManager(tmp_path, incremental=True) as manager:
        manager.save(1, tree).result()
        file = tmp_path / "000001/w/c.0"
        file.write_bytes(file.read_bytes()[::-1])
        os.utime(file, (1, 1))  # A clock may have coarse ticks.
        manager.save(2, tree).result()
        assert_same(manager.restore(tree, 2), tree)
    assert not file.samefile(tmp_path / "000002/w/c.0")
    assert (tmp_path / "000001/v/c.0").samefile(tmp_path / "000002/v/c.0")


def test_a_damaged_step_is_no_base_of_the_one_that_replaces_it(tmp_path):
    tree = {"w": np.arange(9.0)}
    with CheckpointManager(tmp_path, incremental=True) as manager:
        manager.save(1, tree)
        manager.save(2, tree).result()
        os.unlink(tmp_path / "000002/w/c.0")
        with pytest.warns(UserWarning, match="damaged"):
            manager.restore(tree, on_damage="fallback")
        manager.save(2, tree).result()
        assert_same(manager.restore(tree), tree)
    assert (tmp_path / "000001/w/c.0").samefile(tmp_path / "000002/w/c.0")


def test_damage_is_that_of_all_steps_that_share_it(tmp_path):
    tree = {"w": np.arange(9.0)}
    with CheckpointManager(tmp_path, incremental=True) as manager:
        for step in (1, 2):
            manager.save(step, tree)
    file = tmp_path / "000001/w/c.0"
    file.write_bytes(file.read_bytes()[::-1])
    for step in (1, 2):
        with pytest.raises(CorruptCheckpointError, match="c.0"):
            inspect.verify(tmp_path / f"00000{step}")


@pytest.mark.parametrize("place", ["run", "memory://run/a"])
def test_a_database_shares_nothing(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="`incremental` is for checkpoints with"):
        CheckpointManager(place, layout="ocdbt", incremental=True)
    assert not os.listdir()


@pytest.mark.parametrize("place", PLACES)
def test_the_same_objects_are_not_looked_at(tmp_path, place):
    base = {
        "frozen": jnp.arange(64.0),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(1), 3),
        "empty": jnp.zeros((0, 2)),
    }
    host = {"host": np.arange(9.0), "number": np.float32(3)}
    trees = [{**base, **host, "new": jnp.full(3, step)} for step in range(4)]
    all_of_it = {*trees[0]} - ({"empty"} if place == "host" else set())
    with (
        as_on(place),
        small_chunks(),
        CheckpointManager(tmp_path, incremental=True) as manager,
    ):
        looked_at(manager, 0, trees[0], place)
        for step in (1, 2, 3):
            found = looked_at(manager, step, trees[step], place)
            assert found == {"host", "new", "number"}
        # A step of another manager is not known by its objects.
        with CheckpointManager(tmp_path) as other:
            other.save(4, trees[-1])
        assert looked_at(manager, 5, trees[-1], place) == all_of_it
        manager.delete(5)
        assert looked_at(manager, 6, trees[-1], place) == all_of_it
        for step, tree in enumerate(trees):
            assert_same(manager.restore(tree, step), tree)
            assert inspect.verify(tmp_path / f"{step:06d}")
        assert_same(manager.restore(trees[-1], 6), trees[-1])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("in_the_way", ["another codec", "damage", "removal"])
def test_the_same_objects_whose_files_are_no_use(tmp_path, in_the_way, place):
    tree = {"w": jnp.arange(64.0), "v": jnp.arange(64.0) + 1}
    codecs = iter([None, None, "zstd", "zstd"])
    compression = lambda name, record: next(codecs)  # noqa: E731
    is_coded = in_the_way == "another codec"
    with (
        as_on(place),
        small_chunks(),
        CheckpointManager(
            tmp_path, incremental=True, compression=compression if is_coded else None
        ) as manager,
    ):
        manager.save(1, tree).result()
        file = tmp_path / "000001/w/c.2"
        if in_the_way == "damage":
            file.write_bytes(file.read_bytes()[::-1])
            os.utime(file, (1, 1))  # A clock may have coarse ticks.
        elif in_the_way == "removal":
            file.unlink()
        manager.save(2, tree).result()
        assert inspect.verify(tmp_path / "000002")
        assert_same(manager.restore(tree, 2), tree)
    is_shared = (tmp_path / "000002/v/c.2").samefile(tmp_path / "000001/v/c.2")
    assert is_shared != is_coded


@pytest.mark.parametrize("place", PLACES)
def test_progress_counts_what_is_shared(tmp_path, place):
    tree = {"w": jnp.arange(64.0), "v": np.arange(64.0)}
    said = []
    manager = CheckpointManager(
        tmp_path, incremental=True, progress=lambda *x: said.append(x)
    )
    with manager, as_on(place):
        for step in range(2):
            manager.save(step, tree).result()
    assert said[-1][2:] == (768, 768)


def test_what_a_dead_save_shares_is_not_counted(tmp_path):
    tree = {"w": np.arange(1000.0), "v": np.arange(100.0)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, tree)
    dead = tmp_path / ".000002.0123456789abcdef0123456789abcdef.tmp"
    with CheckpointManager(tmp_path, incremental=True) as manager:
        manager.save(2, tree | {"v": np.ones(100)}).result()
        os.unlink(tmp_path / "000002/zarr.json")
        os.rename(tmp_path / "000002", dead)
    of_v = (dead / "v/c.0").stat().st_size
    assert inspect.garbage_collect(tmp_path, dry_run=True) == {str(dead): of_v}
    assert inspect.garbage_collect(tmp_path) == {str(dead): of_v}
    assert inspect.verify(tmp_path / "000001")
