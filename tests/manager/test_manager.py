"""A training run through its manager."""

import concurrent.futures
import os
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager
from faults import preemption
from helpers import assert_same, files_below
from support import committed_manifest as committed, damage_fallback


pytestmark = pytest.mark.oldest


def state(step):
    return {"w": jnp.full(3, step), "history": np.full(5, step), "step": step}


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.fixture
def run(tmp_path):
    """The directory of a run with the steps 100, 200 and 300."""
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (100, 200, 300):
            metadata = {"loss": 1 / step, "acc": step % 200}
            manager.save(step, state(step), metadata=metadata)
    return tmp_path / "run"


def test_a_step_is_an_ordinary_checkpoint(run):
    eqx_ckpt.inspect.verify(run / "000200")
    restored = eqx_ckpt.tree_deserialise_leaves(run / "000200", state(200))
    assert_same(restored, state(200))


def test_a_part_of_a_step(run):
    manager = CheckpointManager(run)
    like = state(300) | {"w": jnp.zeros(3, int)}
    restored = manager.restore(like, where=lambda tree: tree["w"])
    assert_same(restored["w"], state(300)["w"])
    assert_same(manager.restore(jnp.zeros(3, int), 200, prefix="w"), state(200)["w"])


def test_a_metric_that_is_not_there(run):
    with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="'los'"):
        CheckpointManager(run).best("los")


def test_clocks_decide_nothing(run):
    for age, step in enumerate(("000300", "000200", "000100")):
        for path in (run / step, *(run / step).rglob("*")):
            os.utime(path, (age, age))
    manager = CheckpointManager(run)
    assert manager.steps() == [100, 200, 300]
    assert manager.latest() == 300


def test_steps_are_in_numerical_order(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step in (1_000_000, 999_999, 0):
            manager.save(step, {"step": step})
    assert manager.steps() == [0, 999_999, 1_000_000]
    assert sorted(os.listdir(tmp_path)) == ["000000", "1000000", "999999"]


def test_foreign_things_among_the_steps_are_left_alone(run):
    (run / "000400").mkdir()
    (run / "000500").mkdir()
    (run / "000500/zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    (run / "000600").write_text("a file")
    (run / "000700").mkdir()
    (run / "000700/notes.txt").write_text("mine")
    for name in ("100", "0000080", "best", ".hidden.tmp", "000300.bak", "٠٠٠٩٠٠"):
        shutil.copytree(run / "000100", run / name)
    foreign = {f for f in files_below(run) if not f.startswith(("0001", "0002"))}
    with CheckpointManager(run, keep=eqx_ckpt.keep_last(1)) as manager:
        assert manager.steps() == [100, 200, 300]
        assert_same(manager.restore(state(300)), state(300))
        manager.save(301, state(301))
    assert manager.steps() == [301]
    kept = {f for f in foreign if not f.startswith("000300/")}
    assert kept <= files_below(run)


def test_a_step_without_its_manifest_does_not_vanish_in_silence(run, caplog):
    (run / "000300/zarr.json").unlink()
    manager = CheckpointManager(run)
    assert manager.latest() == 200
    assert_same(manager.restore(state(200)), state(200))
    assert f"'{run}/000300' is not a checkpoint" in caplog.text


def test_a_step_that_is_saved_meanwhile_is_no_stranger(run, caplog, monkeypatch):
    is_checkpoint = committed.is_checkpoint

    def look(place):
        if place.url().endswith("/000300"):
            eqx_ckpt.tree_serialise_leaves(run / "000400", state(400), overwrite=True)
        return is_checkpoint(place)

    monkeypatch.setattr(committed, "is_checkpoint", look)
    assert CheckpointManager(run).restore(tree_like(300))["step"] == 300
    assert "is not a checkpoint" not in caplog.text


@pytest.mark.parametrize("manifest", [b"", b"{}}", b'{"eqx_ckpt": 1}', b"\0" * 500])
def test_a_damaged_manifest_does_not_make_a_step_absent(run, manifest):
    (run / "000300/zarr.json").write_bytes(manifest)
    manager = CheckpointManager(run)
    assert manager.steps() == [100, 200, 300]
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="Step 200 is intact"):
        manager.restore(state(300))
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="000300"):
        manager.best("loss")


@pytest.mark.parametrize(
    "damaged",
    [
        lambda data: data.replace(b'"root"', b'"rOot"'),
        lambda data: data[: len(data) // 2],
        lambda data: data[:20],
        lambda data: data[:20] + bytes(len(data) - 20),
        lambda data: bytes(len(data)),
        lambda data: b"",
    ],
)
@pytest.mark.parametrize("layout", ["zarr", "ocdbt"])
def test_a_fallback_from_a_damaged_manifest(run, damaged, layout):
    """The step is replaced, unless there is something that no checkpoint has."""
    path = run / "000300/zarr.json"
    eqx_ckpt.tree_serialise_leaves(
        path.parent, state(300), layout=layout, overwrite=True
    )
    path.write_bytes(damaged(path.read_bytes()))
    with CheckpointManager(run) as manager:
        with pytest.warns(UserWarning, match="step 200 was restored"):
            manager.restore(state(200), on_damage="fallback")
        (run / "000300/notes.txt").write_text("mine")
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match=r"notes\.txt"):
            manager.save(300, state(301))
        (run / "000300/notes.txt").unlink()
        manager.save(300, state(301)).result()
        assert_same(manager.restore(state(300)), state(301))


def test_without_a_whole_step_a_fallback_raises(run):
    for step in ("000100", "000200", "000300"):
        flip(run / step / "w/c.0")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="None of the older"):
        CheckpointManager(run).restore(state(300), on_damage="fallback")


def test_damage_is_said_although_older_steps_cannot_be_read(run, monkeypatch):
    def fails(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(damage_fallback, "verify", fails)
    flip(run / "000300/w/c.0")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'w'") as raised:
        CheckpointManager(run).restore(state(300))
    assert "intact is not known: [Errno 5] Input/output error" in str(raised.value)
    with pytest.raises(OSError, match="Input/output error") as raised:
        CheckpointManager(run).restore(state(300), on_damage="fallback")
    assert isinstance(raised.value.__cause__, eqx_ckpt.CorruptCheckpointError)


def test_a_mismatch_is_no_damage(run):
    like = state(300) | {"w": jnp.zeros(4, int)}
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'w'"):
        CheckpointManager(run).restore(like, on_damage="fallback")


@pytest.mark.parametrize("step", [-1, True])
def test_a_step_that_is_none(tmp_path, step):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match="is not a step"):
        manager.save(step, state(1))
    with pytest.raises(ValueError, match="is not a step"):
        manager.restore(state(1), step)
    assert not list(tmp_path.iterdir())


def test_metadata_that_are_not_json(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(eqx_ckpt.CheckpointError, match=r"\['loss'\]"):
            manager.save(1, state(1), metadata={"loss": jnp.ones(2)})
        assert manager.steps() == []
    assert not list(tmp_path.iterdir())


def test_after_close(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1))
    manager.close()
    manager.close()
    with pytest.raises(eqx_ckpt.CheckpointError, match="is closed"):
        manager.save(2, state(2))
    with pytest.raises(eqx_ckpt.CheckpointError, match="is closed"):
        manager.should_save(2)
    assert_same(manager.restore(state(1)), state(1))


def test_one_save_at_a_time(tmp_path):
    running, most, go_on = [], [], threading.Event()

    def watch(phase, leaf, done, total):
        if phase == "commit":
            running.append(phase)
            most.append(len(running))
            go_on.wait(60)
            running.pop()

    with CheckpointManager(tmp_path, progress=watch) as manager:
        manager.save(1, state(1))
        second = threading.Thread(target=manager.save, args=(2, state(2)))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        go_on.set()
        second.join()
    assert manager.steps() == [1, 2]
    assert most == [1, 1]


def test_a_restore_sees_the_save_before_it(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step in range(5):
            manager.save(step, state(step))
            assert manager.restore(tree_like(step))["step"] == step
            assert manager.restore(tree_like(step), step)["step"] == step


def tree_like(step):
    return state(step) | {"step": -1}


class Failing:
    """A run whose disk goes away in its first save."""

    def __init__(self, directory):
        self.reached = threading.Event()
        self.gone = threading.Event()
        self.directory = directory
        self.manager = CheckpointManager(directory, progress=self._wait)

    def _wait(self, phase, leaf, done, total):
        if phase == "commit" and not self.gone.is_set():
            self.reached.set()
            self.gone.wait(60)

    def break_disk(self):
        assert self.reached.wait(60)
        shutil.rmtree(self.directory)
        self.gone.set()


@pytest.mark.parametrize("method", ["save", "wait", "close", "with"])
def test_a_failure_that_nobody_saw_is_raised_by(tmp_path, method):
    failing = Failing(tmp_path / "run")
    manager = failing.manager
    manager.save(1, state(1))
    failing.break_disk()
    with pytest.raises(FileNotFoundError) as raised:  # noqa: PT012
        if method == "save":
            manager.save(2, state(2))
        elif method == "with":
            with manager:
                pass
        else:
            getattr(manager, method)()
    assert "000001" in raised.value.__notes__[0]
    manager.close()
    assert manager.steps() == []


def test_a_failure_that_was_seen_is_not_raised_again(tmp_path):
    failing = Failing(tmp_path / "run")
    saving = failing.manager.save(1, state(1))
    failing.break_disk()
    with pytest.raises(FileNotFoundError):
        saving.result()
    failing.manager.save(2, state(2))
    failing.manager.close()
    assert failing.manager.steps() == [2]


def test_a_failure_of_one_manager_is_not_anothers(tmp_path):
    failing = Failing(tmp_path / "run")
    failing.manager.save(1, state(1))
    failing.break_disk()
    with CheckpointManager(tmp_path / "other") as manager:
        manager.save(1, state(1))
    eqx_ckpt.tree_serialise_leaves_async(tmp_path / "plain", state(1)).result()
    with pytest.raises(FileNotFoundError):
        failing.manager.close()


def test_a_failure_of_a_lost_manager_is_raised_by_the_next_of_its_run(tmp_path):
    """As in a notebook, whose cell that makes the manager is run again."""
    failing = Failing(tmp_path / "run")
    saving = failing.manager.save(1, state(1))
    failing.break_disk()
    concurrent.futures.wait([saving])
    del failing
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(FileNotFoundError) as raised:
            manager.save(2, state(2))
        manager.save(2, state(2))
    assert "000001" in raised.value.__notes__[0]
    assert manager.steps() == [2]


def test_an_error_in_the_loop_comes_first(tmp_path):
    failing = Failing(tmp_path / "run")
    with pytest.raises(ZeroDivisionError) as raised, failing.manager as manager:  # noqa: PT012
        manager.save(1, state(1))
        failing.break_disk()
        raise ZeroDivisionError
    assert "Besides, a save failed: FileNotFoundError" in raised.value.__notes__[0]


def test_debris_is_removed_at_the_start_and_nothing_else(run):
    uuid = "0123456789abcdef" * 2
    debris = run / f".000400.{uuid}.tmp"
    shutil.copytree(run / "000300", debris)
    (run / f".000500.{uuid}.lock").touch()
    (run / f".final.{uuid}.tmp").mkdir()
    for mine in (".000400.tmp", f".000400.{uuid}", f"000400.{uuid}.tmp"):
        (run / mine).mkdir()
    CheckpointManager(run)
    assert sorted(os.listdir(run)) == sorted(
        ["000100", "000200", "000300"]
        + [".000400.tmp", f".000400.{uuid}", f"000400.{uuid}.tmp"]
    )


def test_a_live_save_is_not_debris(tmp_path):
    reached, go_on = threading.Event(), threading.Event()

    def wait(*_):
        reached.set()
        go_on.wait(60)

    saving = eqx_ckpt.tree_serialise_leaves_async(
        tmp_path / "000001", state(1), progress=wait
    )
    assert reached.wait(60)
    before = set(os.listdir(tmp_path))
    manager = CheckpointManager(tmp_path)
    assert set(os.listdir(tmp_path)) == before
    go_on.set()
    saving.result()
    assert_same(manager.restore(state(1)), state(1))


@pytest.fixture
def readable_run(run):
    """The run, where this process may only read: not as root, if it is root."""
    with tempfile.TemporaryDirectory() as folder:
        path = shutil.copytree(run, Path(folder) / "run")
        os.chmod(folder, 0o755)
        path.chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        yield path
        os.seteuid(user)
        path.chmod(0o755)


def test_a_directory_that_may_only_be_read(readable_run, caplog):
    manager = CheckpointManager(readable_run)
    assert_same(manager.restore(state(300)), state(300))
    with pytest.raises(PermissionError):
        manager.save(400, state(400))
    assert manager.steps() == [100, 200, 300]


def test_a_place_that_is_no_directory(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        CheckpointManager(tmp_path / "file").save(1, state(1))


def test_a_preempted_training_saves_its_last_step(zygote, disk):
    for i in range(20):
        run = disk / str(i)
        status, step = zygote.call(preemption.preempted, str(run), 0.007 * i)
        assert status == 0
        manager = CheckpointManager(run)
        assert manager.latest() in (step, step - 1)
        restored = manager.restore(preemption.state(0))
        assert_same(restored, preemption.state(manager.latest()))
        assert not [name for name in os.listdir(run) if name[0] == "."]


def test_sigterm_does_again_what_it_did_before(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path) as manager:
        assert not manager.should_save(1)
        assert signal.getsignal(signal.SIGTERM) != before
        with CheckpointManager(tmp_path) as other:
            assert not other.should_save(1)
        signal.raise_signal(signal.SIGTERM)
        assert manager.should_save(1)
        manager.save(1, state(1))
        assert not manager.should_save(1)
        assert manager.should_save(2)
    assert signal.getsignal(signal.SIGTERM) == before
    with CheckpointManager(tmp_path) as manager:
        assert not manager.should_save(2)


def test_should_save_outside_the_main_thread(tmp_path):
    errors = []

    def ask():
        try:
            CheckpointManager(tmp_path).should_save(1)
        except eqx_ckpt.CheckpointError as e:
            errors.append(str(e))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]
