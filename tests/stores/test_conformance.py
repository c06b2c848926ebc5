"""What every place does alike: a directory, memory, S3 and Google Cloud Storage.

A new kind of place runs these tests by a subclass of each class, with a fixture that
gives an empty place.
"""

import re
import signal
import threading
import uuid
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import CheckpointManager
from faults.workloads import every_kind, small_chunks, tree
from helpers import assert_same
from stores.place import Place
from stores.s3 import GIVEN
from support import store_at


pytestmark = pytest.mark.usefixtures("impatient")

STEPS = (100, 200, 300)
TIMEOUT = 60.0  # seconds; longer than anything here takes
LAYOUTS = pytest.mark.parametrize("layout", ["zarr", "ocdbt"])


def keys(url: str) -> list[str]:
    """The files of a directory, or the keys of a store, below a place."""
    store = store_at(url)
    return sorted(key.decode() for key in store.list().result())


def change(url: str, pattern: str, how: Callable[[bytes], bytes | None]) -> None:
    """Change or delete the file or object whose key this is found in."""
    store = store_at(url)
    (key,) = [key for key in keys(url) if re.search(pattern, key)]
    store.write(key, how(store.read(key).result().value)).result()


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def lose(data: bytes) -> None:
    """For `change`: delete it."""


def is_replaceable(url: str) -> bool:
    """Whether the place replaces on a condition: a Ceph gateway does not."""
    return not (GIVEN and url.startswith("s3"))


def state(step: int):
    return {"w": jnp.full(3, step), "history": np.full(5, step), "step": step}


def save_step(manager: CheckpointManager, step: int) -> None:
    """Save a step, and let the sweep that follows end."""
    manager.save(step, state(step)).result(TIMEOUT)
    manager.wait()


class Pause:
    """A progress function that waits where it is called first."""

    def __init__(self, phase: str | None = None) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._phase = phase

    def __call__(self, phase: str, *_: object) -> None:
        if self._phase in (None, phase):
            self.reached.set()
            self.go_on.wait(TIMEOUT)


@pytest.fixture
def pause() -> Iterator[Callable[..., Pause]]:
    pauses: list[Pause] = []

    def begin(phase: str | None = None) -> Pause:
        pauses.append(Pause(phase))
        return pauses[-1]

    yield begin
    for one in pauses:
        one.go_on.set()


class CheckpointTests:
    """One checkpoint in a place."""

    @LAYOUTS
    @pytest.mark.parametrize("compression", [None, "zstd"])
    def test_every_kind_of_leaf(self, empty: str, layout, compression) -> None:
        def choose(name, record):
            return compression if record.data_type in ("float32", "int16") else None

        saved = {**every_kind(1), "empty": jnp.zeros((0, 3))}
        with small_chunks(32):
            eqx_ckpt.tree_serialise_leaves(
                empty, saved, layout=layout, compression=choose
            )
        like = {**every_kind(0), "empty": jnp.zeros((0, 3))}
        assert_same(eqx_ckpt.tree_deserialise_leaves(empty, like), saved)
        eqx_ckpt.inspect.verify(empty)
        assert eqx_ckpt.tree_match(empty, saved).ok
        assert eqx_ckpt.inspect.read_manifest(empty).layout == layout

    def test_in_the_background(self, empty: str) -> None:
        tree = {"w": jnp.arange(3.0), "log": np.zeros(3), "step": 1}
        saving = eqx_ckpt.tree_serialise_leaves_async(empty, tree, metadata={"a": 1})
        tree["log"][0] = 1.0
        saving.result(TIMEOUT)
        expected = {**tree, "log": np.zeros(3)}
        assert_same(eqx_ckpt.tree_deserialise_leaves(empty, tree), expected)
        assert eqx_ckpt.inspect.read_manifest(empty).metadata == {"a": 1}

    @LAYOUTS
    def test_onto_another_mesh(self, empty: str, layout) -> None:
        square = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
        line = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
        weight = np.arange(16 * 8, dtype=np.float32).reshape(16, 8)
        saved = jax.device_put(weight, NamedSharding(square, P("x", "y")))
        eqx_ckpt.tree_serialise_leaves(empty, {"w": saved}, layout=layout)
        for spec in (P(None, "x"), P("x")):
            sharding = NamedSharding(line, spec)
            found = eqx_ckpt.tree_deserialise_leaves(
                empty, {"w": saved}, sharding=sharding
            )["w"]
            assert found.sharding == sharding
            assert np.asarray(found).tobytes() == weight.tobytes()

    @LAYOUTS
    def test_overwriting_leaves_nothing_of_the_old(self, empty: str, layout) -> None:
        if not is_replaceable(empty):
            pytest.skip("The place does not replace an object on a condition.")
        counts: set[int] = set()
        for seed in (1, 2):
            eqx_ckpt.tree_serialise_leaves(
                empty, tree(seed), overwrite=True, layout=layout
            )
            assert_same(eqx_ckpt.tree_deserialise_leaves(empty, tree(0)), tree(seed))
            counts.add(len(keys(empty)))
        assert len(counts) == 1
        root = eqx_ckpt.inspect.read_manifest(empty).root
        assert all(key == "zarr.json" or key.startswith(root) for key in keys(empty))
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match="overwrite=True"):
            eqx_ckpt.tree_serialise_leaves(empty, tree(3))
        assert_same(eqx_ckpt.tree_deserialise_leaves(empty, tree(0)), tree(2))

    @LAYOUTS
    def test_readers_see_the_old_or_the_new(self, empty: str, layout) -> None:
        if not is_replaceable(empty):
            pytest.skip("The place does not replace an object on a condition.")
        eqx_ckpt.tree_serialise_leaves(empty, tree(0), layout=layout)
        done, seen = threading.Event(), set[int]()

        def overwrite() -> None:
            for seed in range(1, 6):
                eqx_ckpt.tree_serialise_leaves(
                    empty, tree(seed), overwrite=True, layout=layout
                )
            done.set()

        writer = threading.Thread(target=overwrite)
        writer.start()
        try:
            while not done.is_set() and writer.is_alive():
                restored = eqx_ckpt.tree_deserialise_leaves(empty, tree(0))
                assert_same(restored, tree(restored["step"]))
                seen.add(restored["step"])
        finally:
            writer.join()
        assert done.is_set()
        assert seen
        assert eqx_ckpt.tree_deserialise_leaves(empty, tree(0))["step"] == 5

    def test_not_there(self, empty: str) -> None:
        for read in (
            lambda: eqx_ckpt.tree_deserialise_leaves(empty, tree(0)),
            lambda: eqx_ckpt.inspect.verify(empty),
            lambda: eqx_ckpt.tree_match(empty, tree(0)),
        ):
            with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match=empty):
                read()


class RunTests:
    """A run in a place."""

    @pytest.fixture
    def run(self, empty: str) -> str:
        """A run with the steps 100, 200 and 300."""
        with CheckpointManager(empty) as manager:
            for step in STEPS:
                metadata = {"loss": 1 / step, "acc": step % 200}
                manager.save(step, state(step), metadata=metadata)
        return empty

    def test_a_run(self, run: str) -> None:
        manager = CheckpointManager(run)
        assert manager.steps() == [100, 200, 300]
        assert manager.latest() == 300
        assert_same(manager.restore(state(300)), state(300))
        assert_same(manager.restore(state(100), 100), state(100))
        assert manager.read_manifest(200).metadata == {"loss": 1 / 200, "acc": 0}
        assert manager.best("loss") == 300
        assert manager.best("loss", "max") == 100
        assert manager.best("acc", "max") == 300
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match="000200"):
            manager.save(200, state(1))
        manager.close()
        with pytest.raises(eqx_ckpt.CheckpointError, match="is closed"):
            manager.save(400, state(400))
        assert_same(manager.restore(state(200), 200), state(200))
        assert eqx_ckpt.inspect.verify(f"{run}/000200")

    def test_an_empty_run(self, empty: str) -> None:
        manager = CheckpointManager(empty)
        assert (manager.steps(), manager.latest()) == ([], None)
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="look at `latest"):
            manager.restore(state(0))
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="None of the 0"):
            manager.best("loss")
        assert not keys(empty)

    def test_a_step_that_is_not_there(self, run: str) -> None:
        manager = CheckpointManager(run)
        match = "000150'. The steps there are 100, 200, 300"
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match=match):
            manager.restore(state(150), 150)
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match=match):
            manager.delete(150)
        assert manager.steps() == [100, 200, 300]

    def test_a_tree_without_arrays(self, empty: str) -> None:
        with CheckpointManager(empty) as manager:
            for step in range(3):
                manager.save(step, {"step": step})
            manager.wait()
            assert manager.steps() == [0, 1, 2]
            assert manager.restore({"step": -1}) == {"step": 2}

    def test_should_save(self, empty: str) -> None:
        before = signal.getsignal(signal.SIGTERM)
        with CheckpointManager(empty) as manager:
            assert not manager.should_save(1)
            signal.raise_signal(signal.SIGTERM)
            assert manager.should_save(1)
            manager.save(1, state(1))
            assert not manager.should_save(1)
        assert signal.getsignal(signal.SIGTERM) == before
        assert manager.latest() == 1

    @LAYOUTS
    def test_retention(self, empty: str, layout) -> None:
        keep = [eqx_ckpt.keep_last(2), eqx_ckpt.keep_best("loss", 1)]
        with CheckpointManager(empty, keep=keep, layout=layout) as manager:
            for step in range(6):
                metadata = {"loss": abs(step - 1)}
                manager.save(step, state(step), metadata=metadata).result(TIMEOUT)
                newest = range(max(0, step - 1), step + 1)
                assert manager.steps() == sorted({min(1, step), *newest})
                assert_same(manager.restore(state(step)), state(step))
        assert {key[:6] for key in keys(empty)} <= {
            "000001",
            "000004",
            "000005",
            "metric",
        }
        for step in manager.steps():
            eqx_ckpt.inspect.verify(f"{empty}/{step:06d}")

    @pytest.mark.parametrize("is_averaged", [False, True])
    def test_a_step_that_is_being_read_stays(
        self, run: str, pause, is_averaged: bool
    ) -> None:
        reading, restored = pause(), list[object]()

        def restore() -> object:
            if not is_averaged:
                manager = CheckpointManager(run, progress=reading)
                return manager.restore(state(100), 100)
            source = eqx_ckpt.average([f"{run}/000100"] * 2)
            return eqx_ckpt.tree_deserialise_leaves(
                source, state(100), progress=reading
            )

        reader = threading.Thread(target=lambda: restored.append(restore()))
        reader.start()
        assert reading.reached.wait(TIMEOUT)
        with CheckpointManager(run, keep=eqx_ckpt.keep_last(1)) as manager:
            save_step(manager, 400)
            assert manager.steps() == [100, 400]
            with pytest.raises(eqx_ckpt.CheckpointError, match="100 is being read"):
                manager.delete(100)
            reading.go_on.set()
            reader.join(TIMEOUT)
            assert_same(restored, [state(100)])
            save_step(manager, 500)
            assert manager.steps() == [500]

    def test_no_step_is_removed_because_of_a_broken_one(self, run: str) -> None:
        """Whether it is this manager's or another's, it is not one of those to keep."""
        change(run, r"000300/.*w/c\.0", lose)
        with CheckpointManager(run, keep=eqx_ckpt.keep_last(2)) as manager:
            save_step(manager, 400)
            assert manager.steps() == [200, 300, 400]

            def lose_and_keep(steps) -> list[int]:
                change(run, r"000500/.*w/c\.0", lose)
                return [max(steps)]

        with CheckpointManager(run, keep=lose_and_keep) as manager:
            with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="No older step"):
                save_step(manager, 500)
            assert manager.steps() == [200, 300, 400, 500]

    def test_delete(self, run: str) -> None:
        with CheckpointManager(run) as manager:
            assert manager.delete(200) is None
            assert manager.steps() == [100, 300]
            manager.delete(np.int64(300))
            assert manager.latest() == 100
            assert {key[:6] for key in keys(run)} <= {"000100", "metric"}
            save_step(manager, 300)
            assert manager.steps() == [100, 300]

    def test_a_delete_can_be_asked_for_at_once(self, run: str) -> None:
        """After a save that goes on, and in a manager that is closed."""
        with CheckpointManager(run) as manager:
            manager.save(400, state(400))
            assert manager.should_save(400) is False
            signal.raise_signal(signal.SIGTERM)
            assert manager.should_save(400) is False
            manager.delete(400)
            assert manager.steps() == [100, 200, 300]
            assert manager.should_save(400) is True
        manager.delete(100)
        assert manager.steps() == [200, 300]

    def test_the_state_of_a_recording_is_no_step(self, empty: str) -> None:
        """Without it the recording could not go on."""
        like = {"w": np.zeros(3)}
        with eqx_ckpt.recording.Recording(f"{empty}/rec", like) as recording:
            recording.append(like)
            recording.commit(state(1))
        manager = CheckpointManager(f"{empty}/rec/states")
        (step,) = manager.steps()
        with pytest.raises(eqx_ckpt.CheckpointError, match="belongs to the recording"):
            manager.delete(step)
        assert manager.steps() == [step]

    def test_two_managers_and_one_step(self, empty: str, pause) -> None:
        committing = pause("commit")
        loser = CheckpointManager(empty, progress=committing).save(1, state(8))
        assert committing.reached.wait(TIMEOUT)
        CheckpointManager(empty).save(1, state(9)).result(TIMEOUT)
        committing.go_on.set()
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match="000001' exists"):
            loser.result(TIMEOUT)
        assert_same(CheckpointManager(empty).restore(state(9)), state(9))
        eqx_ckpt.inspect.verify(f"{empty}/000001")
        eqx_ckpt.tree_serialise_leaves(f"{empty}/alone", state(9))
        found = [key for key in keys(empty) if key.startswith("000001/")]
        alone = [key for key in keys(empty) if key.startswith("alone/")]
        assert len(found) == len(alone)

    def test_many_managers_and_one_step(self, empty: str) -> None:
        barrier, errors = threading.Barrier(4), list[BaseException | None]()

        def save(step: int) -> None:
            with CheckpointManager(empty) as manager:
                barrier.wait()
                try:
                    errors.append(manager.save(1, state(step)).exception(TIMEOUT))
                except eqx_ckpt.CheckpointExistsError as e:
                    errors.append(e)

        threads = [threading.Thread(target=save, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
        assert errors.count(None) == 1
        kinds = {type(error) for error in errors if error is not None}
        assert kinds == {eqx_ckpt.CheckpointExistsError}
        eqx_ckpt.inspect.verify(f"{empty}/000001")
        root = eqx_ckpt.inspect.read_manifest(f"{empty}/000001").root
        below = [key.removeprefix("000001/") for key in keys(empty)]
        assert all(key == "zarr.json" or key.startswith(root) for key in below)

    def test_damage_names_the_leaf_and_an_older_step_that_is_intact(
        self, run: str
    ) -> None:
        change(run, r"000300/.*\bw/c.0", flip)
        change(run, r"000200/.*history/c.0", lose)
        manager = CheckpointManager(run)
        with pytest.raises(eqx_ckpt.CorruptCheckpointError) as raised:
            manager.restore(state(300))
        assert "- 'w': " in str(raised.value)
        fallback = "Step 100 is intact: pass `on_damage='fallback'`"
        assert fallback in str(raised.value)
        assert manager.latest() == 300

    @pytest.mark.parametrize("damaged", [r"000300/.*\bw/c.0", "000300/zarr.json"])
    def test_a_fallback_warns_and_the_run_goes_on(self, run: str, damaged: str) -> None:
        change(run, damaged, flip)
        with CheckpointManager(run, keep=eqx_ckpt.keep_last(1)) as manager:
            with pytest.warns(UserWarning, match="Step 300 is damaged, and step 200"):
                restored = manager.restore(state(200), on_damage="fallback")
            assert_same(restored, state(200))
            save_step(manager, 250)
            # What is damaged is not taken for the newest one that is to be kept.
            assert manager.steps() == [250, 300]
            if not is_replaceable(run):
                with pytest.raises(eqx_ckpt.CheckpointError, match="single_writer"):
                    manager.save(300, state(300))
                return
            save_step(manager, 300)
            assert manager.steps() == [300]
            assert_same(manager.restore(state(300)), state(300))
            eqx_ckpt.inspect.verify(f"{run}/000300")


class InDirectory:
    @pytest.fixture
    def empty(self, tmp_path) -> str:
        return str(tmp_path / "run")


class InMemory:
    @pytest.fixture
    def empty(self) -> str:
        return f"memory://{uuid.uuid4().hex}/run"


class InS3:
    @pytest.fixture
    def empty(self, s3: Place) -> str:
        return s3.url


class InGoogle:
    @pytest.fixture
    def empty(self, gcs: Place) -> str:
        return gcs.url


class TestCheckpointInDirectory(InDirectory, CheckpointTests): ...


class TestCheckpointInMemory(InMemory, CheckpointTests): ...


class TestCheckpointInS3(InS3, CheckpointTests): ...


class TestCheckpointInGoogle(InGoogle, CheckpointTests): ...


class TestRunInDirectory(InDirectory, RunTests): ...


class TestRunInMemory(InMemory, RunTests): ...


class TestRunInS3(InS3, RunTests): ...


class TestRunInGoogle(InGoogle, RunTests): ...
