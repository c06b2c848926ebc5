"""The steps of a run in a store share chunks, and any of them can be deleted."""

import json
import shutil
import threading
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fastcrc import crc32
from hypothesis import given, HealthCheck, settings, strategies as st

import eqx_ckpt
from eqx_ckpt import CheckpointManager, inspect, keep_last
from faults.workloads import every_kind, small_chunks
from helpers import assert_same
from save.test_schemas import edited
from stores import proxy
from support import heartbeat, KeyValues, locate, MANIFEST, Marks, open_kvstore, SWEPT


pytestmark = [pytest.mark.once, pytest.mark.usefixtures("impatient")]

MARK = "incremental"
TIMEOUT = 120.0  # seconds; longer than anything here takes


def keys(url):
    """All keys below a place."""
    store = open_kvstore(locate(url).spec)
    return {key.decode() for key in store.list().result()}


def path_of(url, step):
    return f"{url}/{step:06d}"


def manifest_of(url, step):
    return inspect.read_manifest(path_of(url, step))


def referred_to(url, steps):
    """The keys of chunks that manifests refer to, in attempts of other steps."""
    found = set()
    for step in steps:
        manifest = manifest_of(url, step)
        for name, attempts in manifest.references.items():
            record = manifest.leaves[name]
            assert len(attempts) == len(record.checksums)
            for i, attempt in enumerate(attempts):
                # All arrays here have at most one axis.
                at = [str(i)] if record.data_shape else []
                found.add(f"{attempt}{name}/{'.'.join(['c', *at])}" if attempt else "")
    return found - {""}


def removed_by_time(manager, clock, times=2):
    """Let so much time pass that a manager removes what nothing refers to."""
    for _ in range(times):
        manager._sweeps.begin()
        manager.wait()
        clock.now += heartbeat.ORPHANED_AFTER + 1
    manager._sweeps.begin()
    manager.wait()


class Training:
    """Managers of a run, a state that changes, and what each step has to be."""

    def __init__(self, url, clock):
        self.url, self.clock = url, clock
        self.tree = {"a": np.zeros(16), "b": jnp.zeros(16), "c": jnp.ones(3), "s": 1}
        self.steps = {}
        self.number = 0
        self.managers = [self.made(), self.made()]

    def made(self):
        return CheckpointManager(self.url, incremental=True)

    def do(self, what, of):
        if what == "change in place":
            self.tree["a"][of % 16] += 1
        elif what == "change":
            self.tree["b"] = self.tree["b"].at[of % 16].add(1)
        elif what == "anew":
            self.tree = jax.tree.map(lambda x: x + 0, self.tree)
        elif what == "save":
            self.number += 1
            self.save(self.number, of)
        elif what == "save compressed":
            self.number += 1
            self.managers[of % 2]._compression = "zstd"
            self.save(self.number, of)
        elif what == "save an earlier one again" and self.number:
            step = 1 + of % self.number
            if step not in self.steps:
                self.save(step, of)
        elif what == "replace" and self.steps:
            step = sorted(self.steps)[of % len(self.steps)]
            base = path_of(self.url, sorted(self.steps)[of // 2 % len(self.steps)])
            with small_chunks(32):
                eqx_ckpt.tree_serialise_leaves(
                    path_of(self.url, step), self.tree, overwrite=True, base=base
                )
            self.note(step)
        elif what == "start again":
            self.managers[of % 2] = self.made()
        elif what == "delete" and self.steps:
            step = sorted(self.steps)[of % len(self.steps)]
            self.managers[of % 2].delete(step)
            del self.steps[step]
        elif what == "time":
            removed_by_time(self.managers[of % 2], self.clock, 1 + of % 2)

    def save(self, step, of):
        with small_chunks(32):
            self.managers[of % 2].save(step, self.tree).result(TIMEOUT)
        self.note(step)

    def note(self, step):
        self.steps[step] = jax.tree.map(np.array, self.tree)

    def check(self):
        assert self.managers[0].steps() == sorted(self.steps)
        for step, tree in self.steps.items():
            assert inspect.verify(path_of(self.url, step))
            like = {**self.tree, "s": 0}
            assert_same(
                jax.tree.map(np.asarray, self.managers[1].restore(like, step)), tree
            )

    def check_that_no_more_is_left(self):
        for _ in range(2):
            removed_by_time(self.managers[0], self.clock)
        own = {f"{step:06d}/{manifest_of(self.url, step).root}" for step in self.steps}
        used = referred_to(self.url, self.steps)
        for key in keys(self.url) - {MARK}:
            is_manifest = key.endswith("/zarr.json") and key.count("/") == 1
            is_own = any(key.startswith(attempt) for attempt in own)
            assert is_manifest or is_own or key in used, key


CALLS = [
    "change in place",
    "change",
    "anew",
    "save",
    "save",
    "save",
    "save compressed",
    "save an earlier one again",
    "replace",
    "start again",
    "delete",
    "delete",
    "time",
]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 31)), max_size=20)
)
def test_any_deletion_in_any_order(clock, calls):
    training = Training(f"memory://{uuid.uuid4().hex}/run", clock)
    training.do("save", 0)
    for what, of in calls:
        training.do(what, of)
        if what in ("save", "delete", "replace", "time"):
            training.check()
    training.check_that_no_more_is_left()
    for step in [*training.steps]:
        training.managers[0].delete(step)
        del training.steps[step]
    training.check_that_no_more_is_left()
    assert keys(training.url) <= {MARK}


@settings(max_examples=12)
@given(data=st.data())
def test_what_is_equal_is_shared_for_every_kind_of_leaf(data):
    url = f"memory://{uuid.uuid4().hex}/run"
    made = {seed: {**every_kind(seed), "none": jnp.zeros((0, 3))} for seed in (1, 2)}
    names = sorted(made[1])
    seeds = data.draw(
        st.fixed_dictionaries({n: st.sampled_from([1, 2]) for n in names})
    )
    tree = {name: made[seed][name] for name, seed in seeds.items()}
    codec = data.draw(st.sampled_from([None, "zstd"]))
    is_async = data.draw(st.booleans())
    with small_chunks(32):
        eqx_ckpt.tree_serialise_leaves(path_of(url, 1), made[1], compression=codec)
        how = {"compression": codec, "base": path_of(url, 1)}
        if is_async:
            eqx_ckpt.tree_serialise_leaves_async(path_of(url, 2), tree, **how).result()
        else:
            eqx_ckpt.tree_serialise_leaves(path_of(url, 2), tree, **how)
        eqx_ckpt.tree_serialise_leaves(path_of(url, 3), tree, compression=codec)
    assert inspect.verify(path_of(url, 2))
    assert_same(eqx_ckpt.tree_deserialise_leaves(path_of(url, 2), tree), tree)
    found, alone = manifest_of(url, 2), manifest_of(url, 3)
    base = manifest_of(url, 1)
    for name, record in alone.leaves.items():
        assert found.leaves[name].checksums == record.checksums
        pairs = zip(record.checksums, base.leaves[name].checksums, strict=True)
        shared = [a[8:] == b[8:] for a, b in pairs]
        assert [bool(a) for a in found.references.get(name, ())] == (
            shared if any(shared) else []
        )
    assert inspect.digest(path_of(url, 2)) == inspect.digest(path_of(url, 3))


@pytest.mark.parametrize("scheme", ["s3", "gcs"])
def test_a_step_costs_what_has_changed(scheme, request):
    place = request.getfixturevalue(scheme)
    sent = []

    def count(exchange):
        sent.append(len(exchange.body))
        proxy.passed(exchange)

    place.proxy.add(count, "PUT" if scheme == "s3" else "POST")
    tree = {"frozen": np.random.default_rng(0).random((50, 1000)), "n": jnp.zeros(4)}
    with small_chunks(8000), CheckpointManager(place.url, incremental=True) as manager:
        manager.save(1, tree).result(TIMEOUT)
        assert len(sent) > 50
        for step in (2, 3):
            sent.clear()
            tree = {"frozen": tree["frozen"].copy(), "n": tree["n"] + 1}
            manager.save(step, tree).result(TIMEOUT)
            # The mark of the run, the pin, a chunk, its metadata, the manifest.
            assert len(sent) == 5
            assert sum(sent) < 10_000
        manager.delete(1)
        for step in (2, 3):
            assert inspect.verify(path_of(place.url, step))
        assert_same(manager.restore(tree), tree)


def saved_twice(url, tree=None):
    tree = {"w": np.arange(16.0), "n": jnp.zeros(2)} if tree is None else tree
    with small_chunks(32), CheckpointManager(url, incremental=True) as manager:
        manager.save(1, tree).result(TIMEOUT)
        manager.save(2, {**tree, "n": tree["n"] + 1}).result(TIMEOUT)
    return tree, {**tree, "n": tree["n"] + 1}


def test_what_each_step_has_for_itself(url):
    """By manifests alone, in bytes of data; what two steps have is neither's."""
    tree, changed = saved_twice(url)
    tree["w"] = tree["w"] + (np.arange(16.0) < 4)
    with small_chunks(32), CheckpointManager(url, incremental=True) as manager:
        manager.save(3, {"w": tree["w"], "n": changed["n"]}).result(TIMEOUT)
        # `n` of the first step, and a chunk of `w` of the third.
        assert inspect.own_bytes(url) == {1: 8, 2: 0, 3: 32}
        manager.delete(1)
        assert inspect.own_bytes(url) == {2: 32, 3: 32}
        manager.delete(3)
        assert inspect.own_bytes(url) == {2: 128 + 8}


@pytest.fixture
def url():
    return f"memory://{uuid.uuid4().hex}/run"


def test_what_is_missing_is_named(url):
    _, tree = saved_twice(url)
    attempt = manifest_of(url, 2).references["w"][0]
    open_kvstore(locate(url).spec).write(f"{attempt}w/c.2", None).result()
    words = rf"'w': {attempt}w/c.2 is missing"
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=words):
        eqx_ckpt.tree_deserialise_leaves(path_of(url, 2), tree)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=words):
        inspect.verify(path_of(url, 2))
    # It is not shared again, but written.
    with small_chunks(32), CheckpointManager(url, incremental=True) as manager:
        manager.save(3, tree).result(TIMEOUT)
    assert inspect.verify(path_of(url, 3))
    assert manifest_of(url, 3).references["w"] == (attempt, attempt, "", attempt)


def test_a_copy_stands_alone(url, tmp_path):
    _, tree = saved_twice(url)
    eqx_ckpt.copy(path_of(url, 2), tmp_path / "copy")
    assert not inspect.read_manifest(tmp_path / "copy").references
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "copy", tree), tree)
    eqx_ckpt.copy(path_of(url, 2), url.replace("run", "other"))
    assert inspect.verify(url.replace("run", "other"))


def downloaded(url, folder):
    store = open_kvstore(locate(url).spec)
    for key in keys(url):
        file = folder / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(store.read(key).result().value)


def test_a_run_that_was_downloaded_is_read_and_no_step_of_it_removed(url, tmp_path):
    first, tree = saved_twice(url)
    downloaded(url, tmp_path / "run")
    manager = CheckpointManager(tmp_path / "run", keep=keep_last(1))
    assert manager.steps() == [1, 2]
    assert inspect.verify(tmp_path / "run" / "000002")
    assert_same(manager.restore(tree), tree)
    with pytest.raises(eqx_ckpt.CheckpointError, match="copied from a store"):
        manager.delete(1)
    with pytest.raises(eqx_ckpt.CheckpointError, match="copied from a store"):
        manager.save(3, tree).result(TIMEOUT)
    assert_same(manager.restore(tree, 3), tree)
    assert_same(manager.restore(first, 1), first)
    with pytest.raises(eqx_ckpt.CheckpointError, match="copied from a store"):
        eqx_ckpt.tree_serialise_leaves(
            tmp_path / "run" / "000001", tree, overwrite=True
        )
    assert inspect.verify(tmp_path / "run" / "000002")
    # One step alone is not enough.
    shutil.copytree(tmp_path / "run" / "000002", tmp_path / "half" / "000002")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=r"000001/@.*missing"):
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "half" / "000002", tree)


def test_a_run_in_a_directory_may_have_a_neighbour_of_any_name(tmp_path):
    for run in (tmp_path / MARK, tmp_path):
        with CheckpointManager(run, keep=keep_last(1)) as manager:
            for step in (1, 2):
                manager.save(step, {"w": np.ones(3)})
        assert manager.steps() == [2]


def test_only_steps_of_one_run_share(url, tmp_path):
    tree = {"w": np.ones(3)}
    eqx_ckpt.tree_serialise_leaves(f"{url}/000001", tree)
    eqx_ckpt.tree_serialise_leaves(f"{url}/start", tree)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "base", tree)
    before = keys(url)
    for path, base in [
        (f"{url}/000002", f"{url}/start"),
        (f"{url}/other", f"{url}/000001"),
        (f"{url}x/000002", f"{url}/000001"),
        (f"{url}/000002", tmp_path / "base"),
        (tmp_path / "new", f"{url}/000001"),
    ]:
        with pytest.raises(ValueError, match="Nothing can be shared with `base`"):
            eqx_ckpt.tree_serialise_leaves(path, tree, base=base)
    with pytest.raises(ValueError, match="`incremental` is for checkpoints with"):
        CheckpointManager(url, incremental=True, layout="ocdbt")
    assert keys(url) == before


def test_chunks_with_the_same_crc_32c_are_told_apart(url):
    def ending_alike(text):
        return np.frombuffer(text + crc32.iscsi(text).to_bytes(4, "little"), np.uint8)

    one, two = ending_alike(b"12345678"), ending_alike(b"abcdefgh")
    trees = {1: {"w": one, "v": two}, 2: {"w": two, "v": one}}
    manager = CheckpointManager(url, incremental=True)
    for step, tree in trees.items():
        manager.save(step, tree).result(TIMEOUT)
    for step, tree in trees.items():
        assert_same(manager.restore(tree, step), tree)
    assert not manifest_of(url, 2).references


class Pause:
    """A progress function that waits before the commit."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, phase, *_):
        if phase == "commit":
            self.reached.set()
            assert self.go_on.wait(TIMEOUT)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_save_refers_to_is_kept_while_it_lives(url, clock, is_late, caplog):
    """The base is deleted before the commit, and long ago, as a sweeper sees it."""
    tree, _ = saved_twice(url)
    pause = Pause()
    with small_chunks(32):
        saving = eqx_ckpt.tree_serialise_leaves_async(
            path_of(url, 3), tree, base=path_of(url, 2), progress=pause
        )
        assert pause.reached.wait(TIMEOUT)
    manager = CheckpointManager(url)
    manager.delete(1)
    manager.delete(2)
    (own,) = {key.split("/")[1] for key in keys(url) if key.startswith("000003/")}
    store = open_kvstore(locate(url).spec)
    for beat in range(6):
        if not is_late:
            # What the heartbeat of a save does meanwhile.
            store.write(f"000003/{own}/alive.{beat}", b"1").result()
        manager._sweeps.begin()
        manager.wait()
        clock.now += heartbeat.ORPHANED_AFTER / 2
    # Heartbeats are beside what says which attempts it refers to, and say nothing.
    assert "Nothing can be swept" not in caplog.text
    if not is_late:
        clock.now = 1000.0  # The save has not been suspended.
    pause.go_on.set()
    if is_late:
        with pytest.raises(eqx_ckpt.CheckpointError, match="suspended"):
            saving.result(TIMEOUT)
        assert manager.steps() == []
    else:
        saving.result(TIMEOUT)
        assert inspect.verify(path_of(url, 3))
        assert_same(manager.restore(tree), tree)


def values(url):
    """What writes a value of a key of a run, or deletes it, as nobody here would."""
    store = open_kvstore(locate(url).spec)
    return lambda key, value=None: store.write(key, value).result()


def paused_save(url, step, tree, base):
    """A save that waits before its commit, and what lets it go on."""
    pause = Pause()
    with small_chunks(32):
        saving = eqx_ckpt.tree_serialise_leaves_async(
            path_of(url, step), tree, base=path_of(url, base), progress=pause
        )
        assert pause.reached.wait(TIMEOUT)
    return saving, pause


def sweep(manager):
    manager._sweeps.begin()
    manager.wait()


def test_ten_minutes_pass_after_the_last_reference(url, clock, monkeypatch):
    """A list may lag for so long, and lack who refers to something by now."""
    tree, _ = saved_twice(url)
    manager = CheckpointManager(url)
    manager.delete(1)
    sweep(manager)
    clock.now += heartbeat.ORPHANED_AFTER + 1
    saving, pause = paused_save(url, 3, tree, 2)
    manager.delete(2)
    list_keys = KeyValues.list_keys

    def lagging(place):
        return [key for key in list_keys(place) if not key.startswith("000003/")]

    with monkeypatch.context() as patch:
        patch.setattr(KeyValues, "list_keys", lagging)
        sweep(manager)
    pause.go_on.set()
    saving.result(TIMEOUT)
    assert inspect.verify(path_of(url, 3))


@pytest.mark.parametrize("is_taken_back", [False, True])
def test_who_begins_while_a_manager_removes_keeps_its_chunks(
    url, clock, monkeypatch, is_taken_back
):
    """Its base is a manifest that comes late, and perhaps goes again."""
    _, tree = saved_twice(url)
    late = open_kvstore(locate(url).spec).read("000002/zarr.json").result().value
    write, manager = values(url), CheckpointManager(url)
    write("000002/zarr.json")
    manager.delete(1)
    begun = []

    def begin():
        if not begun:
            write("000002/zarr.json", late)
            begun.append(paused_save(url, 3, tree, 2))
            if is_taken_back:
                write("000002/zarr.json")

    read, delete = Marks.read, KeyValues.delete

    def reading(marks, everything, dead):
        if is_taken_back and dead:
            begin()
        read(marks, everything, dead)

    def deleting(place, keys):
        if any("/" in key for key in keys):
            begin()
        delete(place, keys)

    monkeypatch.setattr(Marks, "read", reading)
    monkeypatch.setattr(KeyValues, "delete", deleting)
    sweep(manager)
    clock.now += heartbeat.ORPHANED_AFTER + 1
    sweep(manager)
    ((saving, pause),) = begun
    pause.go_on.set()
    saving.result(TIMEOUT)
    assert inspect.verify(path_of(url, 3))
    assert_same(manager.restore(tree, 3), tree)


def test_the_manifest_of_an_attempt_is_read_once(url, clock, monkeypatch):
    _, tree = saved_twice(url)
    manager = CheckpointManager(url)
    manager.delete(1)
    plain = CheckpointManager(f"{url}s")
    plain.save(1, tree).result(TIMEOUT)
    read_step, seen = Marks._read_step, []

    def reading(marks, step):
        seen.append(step)
        return read_step(marks, step)

    def read_by_a_sweep(manager=manager):
        seen.clear()
        sweep(manager)
        clock.now += heartbeat.ORPHANED_AFTER + 1
        return set(seen)

    monkeypatch.setattr(Marks, "_read_step", reading)
    assert read_by_a_sweep() == {"000002"}
    assert read_by_a_sweep() == set()
    open_kvstore(locate(f"{url}s").spec).write(
        f"000001/@{uuid.uuid4().hex}/w/c", b""
    ).result()
    assert read_by_a_sweep(plain) == set()
    eqx_ckpt.tree_serialise_leaves(path_of(url, 2), tree, overwrite=True)
    assert read_by_a_sweep() == {"000002"}


def test_a_list_that_lacks_everything_removes_nothing(url, clock, monkeypatch):
    _, tree = saved_twice(url)
    manager = CheckpointManager(url)
    manager.delete(1)
    write, list_keys, blind = KeyValues.write, KeyValues.list_keys, []

    def writing(place, key, value, *version):
        if key == SWEPT:
            blind.append(1)
        return write(place, key, value, *version)

    def listing(place):
        return [] if blind and blind.pop() else list_keys(place)

    monkeypatch.setattr(KeyValues, "write", writing)
    monkeypatch.setattr(KeyValues, "list_keys", listing)
    sweep(manager)
    clock.now += heartbeat.ORPHANED_AFTER + 1
    sweep(manager)
    assert inspect.verify(path_of(url, 2))
    assert_same(manager.restore(tree, 2), tree)


def test_a_mark_that_is_missing_once_is_there(url, monkeypatch):
    saved_twice(url)
    manager = CheckpointManager(url)
    read, wrong = KeyValues.read, [1]

    def reading(place, key, *most):
        return (
            None if key == MARK and wrong and wrong.pop() else read(place, key, *most)
        )

    monkeypatch.setattr(KeyValues, "read", reading)
    manager.delete(1)
    assert not wrong
    assert inspect.verify(path_of(url, 2))


def test_what_was_copied_to_a_run_is_deleted_at_once(url, tmp_path):
    """Nothing refers to what has no prefix, and no sweep looks there."""
    eqx_ckpt.tree_serialise_leaves(tmp_path / "000001", {"w": np.ones(3)})
    write = values(url)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            write(str(file.relative_to(tmp_path)), file.read_bytes())
    manager = CheckpointManager(url, incremental=True)
    for step in (2, 3):
        manager.save(step, {"w": np.ones(3)}).result(TIMEOUT)
    manager.delete(1)
    assert not {key for key in keys(url) if key.startswith("000001/")}
    manager.save(1, {"w": np.ones(3)}).result(TIMEOUT)


def test_what_is_no_checkpoint_refers_to_nothing(url, clock):
    saved_twice(url)
    values(url)("000007/zarr.json", b'{"zarr_format": 3, "node_type": "group"}')
    manager = CheckpointManager(url)
    for step in (1, 2):
        manager.delete(step)
    removed_by_time(manager, clock)
    assert keys(url) == {MARK, "000007/zarr.json"}


def test_who_is_taken_back_leaves_what_others_refer_to_by_now(url, clock, monkeypatch):
    """Another save refers to a step that was there for a moment only."""
    shared, old, new = np.arange(4.0), np.zeros(4), np.ones(4)
    manager = CheckpointManager(url, incremental=True)
    manager.save(1, {"a": old, "b": old}).result()
    other = CheckpointManager(url, incremental=True)
    store, writing = open_kvstore(locate(url).spec), KeyValues.writing

    def answered_late(place, key, value, *args, **kwargs):
        future = writing(place, key, value, *args, **kwargs)
        if key == MANIFEST and "000002" in str(place):
            monkeypatch.setattr(KeyValues, "writing", writing)
            future.result()
            other.save(3, {"a": old, "b": shared}).result()
            (lost,) = (k for k in keys(url) if k.startswith("000002/@") and "/a/c" in k)
            store.write(lost, None).result()
            clock.now += heartbeat.FAIL_AFTER + 1
        return future

    monkeypatch.setattr(KeyValues, "writing", answered_late)
    with pytest.raises(eqx_ckpt.CheckpointError, match="may have removed its data"):
        manager.save(2, {"a": new, "b": shared}).result()
    assert other.steps() == [1, 3]
    assert any(key.startswith("000002/") for key in referred_to(url, [3]))
    removed_by_time(other, clock)
    assert_same(other.restore({"a": old, "b": old}, 3), {"a": old, "b": shared})


def test_who_refers_to_nothing_deletes_at_once(url):
    manager = CheckpointManager(url)
    manager.save(1, {"w": np.ones(3)}).result(TIMEOUT)
    manager.delete(1)
    assert keys(url) == set()


ATTEMPT = "000001/@" + "0" * 32 + "/"


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.update(attempts=["../@" + "0" * 32 + "/"]),
        lambda found: found.update(attempts=["000001/../secret/"]),
        lambda found: found.update(attempts=[ATTEMPT + "w/"]),
        lambda found: found.update(attempts=[]),
        lambda found: found.update(attempts=found["attempts"] * 2),
        lambda found: found["attempts"].append(ATTEMPT),
        lambda found: found.update(chunks={}),
        lambda found: found.update(more=1),
        lambda found: found.update(attempts=[["x"]]),
        lambda found: found["chunks"].update(w=1),
        lambda found: found["chunks"].update(w=-1),
        lambda found: found["chunks"].update(w=True),
        lambda found: found["chunks"].update(w="0"),
        lambda found: found["chunks"].update(w=[0]),
        lambda found: found["chunks"].update(w=[None] * 4),
        lambda found: found["chunks"].update(x=0),
        lambda found: found["chunks"].update(step=0),
        lambda found: found["chunks"].update({"../x": 0}),
    ],
)
def test_wrong_references_are_damage(url, change):
    tree, _ = saved_twice(url, {"w": np.arange(16.0), "n": jnp.zeros(2), "step": 1})
    store = open_kvstore(locate(url).spec)
    before = store.read("000002/zarr.json").result().value
    after = edited(before, lambda found: change(found["necessary"]["references"]))
    store.write("000002/zarr.json", after).result()
    for read in (
        inspect.read_manifest,
        inspect.verify,
        lambda path: eqx_ckpt.tree_deserialise_leaves(path, tree),
    ):
        with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="is damaged"):
            read(path_of(url, 2))


def test_a_step_that_refers_to_itself_is_damaged(url):
    saved_twice(url)
    store = open_kvstore(locate(url).spec)
    before = store.read("000002/zarr.json").result().value
    root = json.loads(before)["attributes"]["eqx_ckpt"]["root"]

    def refer_to_itself(found):
        found["necessary"]["references"]["attempts"] = [f"000002/{root}"]

    store.write("000002/zarr.json", edited(before, refer_to_itself)).result()
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="refers to itself"):
        inspect.read_manifest(path_of(url, 2))


def test_a_run_at_the_root_of_a_store(s3):
    """It shares chunks as any other one."""
    tree = {"w": np.arange(16.0), "n": np.zeros(2)}
    for root in (f"s3://{s3.bucket}", "memory://"):
        with CheckpointManager(root, incremental=True) as manager:
            for step in (1, 2):
                manager.save(step, {**tree, "n": tree["n"] + step}).result(TIMEOUT)
            manager.delete(1)
            assert manager.steps() == [2]
            assert manager.read_manifest(2).references.keys() == {"w"}
            assert_same(manager.restore(tree), {**tree, "n": tree["n"] + 2})
            manager.delete(2)


def test_a_save_that_has_ended_does_not_fail_because_of_a_wrong_answer(s3):
    tree = {"w": np.arange(16.0)}
    eqx_ckpt.tree_serialise_leaves(path_of(s3.url, 1), tree)
    for step, save in (
        (2, eqx_ckpt.tree_serialise_leaves),
        (3, eqx_ckpt.tree_serialise_leaves_async),
    ):
        # The first one is before the commit.
        manifest = rf"00000{step}(?:/|%2F)zarr"
        rule = s3.proxy.add(proxy.answered(412), "GET", manifest, when={2})
        saving = save(path_of(s3.url, step), tree, base=path_of(s3.url, 1))
        if saving is not None:
            saving.result(TIMEOUT)
        assert rule.struck == 1
        assert inspect.verify(path_of(s3.url, step))
