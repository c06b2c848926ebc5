"""Saves that go on while the caller donates, deletes and overwrites what it saved."""

import concurrent.futures
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import eqx_ckpt
from helpers import assert_same


MIB = 2**20


class Gate:
    """A `progress` that stops the writer where a phase begins, until it is opened."""

    def __init__(self, phase):
        self.phase = phase
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, phase, leaf, done, total):
        if phase == self.phase:
            self.reached.set()
            assert self.opened.wait(60)


def copied(tree):
    return jax.tree.map(lambda x: np.array(x) if eqx.is_array_like(x) else x, tree)


def sharded(array, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))


def run_python(program, *args, **kwargs):
    """Run a program in a process of its own; warnings of JAX about forks are noise."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), *args]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, **kwargs
    )


def test_it_saves_what_the_sync_verb_saves(tmp_path, getkey):
    tree = {
        "model": eqx.nn.MLP(2, 2, 8, 2, key=getkey()),
        "key": jax.random.split(getkey(), 3),
        "float64": np.arange(3.0),
        "swapped": np.arange(3, dtype=">i4"),
        "int4": jnp.arange(4, dtype=jnp.int4),
        "empty": jnp.zeros((0, 3)),
        "sharded": sharded(np.arange(32.0, dtype=np.float32).reshape(8, 4), "xy"),
        "step": 7,
    }
    saving = eqx_ckpt.tree_serialise_leaves_async(tmp_path / "a", tree)
    assert isinstance(saving, concurrent.futures.Future)
    assert saving.result() is None
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", tree)
    a, b = (eqx_ckpt.inspect.read_manifest(tmp_path / name) for name in "ab")
    assert a == b
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "a", tree), tree)


def test_a_training_loop_may_do_with_its_arrays_what_it_likes(tmp_path):
    @jax.jit
    def initial(key):
        return {"w": jax.random.normal(key, (300, 100)), "key": key, "n": jnp.zeros(())}

    def step(state):
        noise = jax.random.normal(state["key"], (300, 100))
        key = jax.random.split(state["key"])[0]
        return {"w": state["w"] * 0.9 + noise, "key": key, "n": state["n"] + 1}

    keeping, donating = jax.jit(step), jax.jit(step, donate_argnums=0)
    state = initial(jax.random.key(0))
    twin = initial(jax.random.key(0))
    everywhere = sharded(np.zeros((8, 4), np.float32), ("x",))
    history = np.zeros(50_000)
    gate = Gate("commit")
    expected, saves = [], []
    for i in range(10):
        tree = {"state": state, "everywhere": everywhere, "history": history}
        expected.append(
            {
                "state": twin,
                "everywhere": np.full((8, 4), i, np.float32),
                "history": history.copy(),
            }
        )
        saves.append(
            eqx_ckpt.tree_serialise_leaves_async(tmp_path / str(i), tree, progress=gate)
        )
        del tree
        state, twin = donating(state), keeping(twin)
        history += 1  # in place
        old, everywhere = everywhere, everywhere + 1
        old.delete()
    assert not any(saving.done() for saving in saves)
    gate.opened.set()
    for i, saving in enumerate(saves):
        saving.result()
        like = eqx_ckpt.tree_like(tmp_path / str(i))
        restored = eqx_ckpt.tree_deserialise_leaves(tmp_path / str(i), like)
        assert_same(restored["state"], expected[i]["state"])
        assert np.array_equal(restored["everywhere"], expected[i]["everywhere"])
        assert np.array_equal(restored["history"], expected[i]["history"])


def test_metadata_are_those_of_the_call(tmp_path):
    gate = Gate("write")
    metadata = {"losses": [0.5]}
    saving = eqx_ckpt.tree_serialise_leaves_async(
        tmp_path / "new", jnp.ones(3), metadata=metadata, progress=gate
    )
    metadata["losses"].append(0.4)
    gate.opened.set()
    saving.result()
    assert eqx_ckpt.inspect.read_manifest(tmp_path / "new").metadata == {
        "losses": [0.5]
    }


def test_it_returns_before_the_data_are_written(tmp_path):
    gate = Gate("commit")
    saving = eqx_ckpt.tree_serialise_leaves_async(
        tmp_path / "new", jnp.ones(3), progress=gate
    )
    assert gate.reached.wait(60)
    assert not saving.done()
    assert not saving.cancel()
    assert not (tmp_path / "new").exists()
    gate.opened.set()
    saving.result()
    eqx_ckpt.inspect.verify(tmp_path / "new")


def test_what_does_not_fit_is_waited_for(tmp_path):
    tree = {str(i): np.full(8 * MIB, i, np.uint8) for i in range(20)}
    gate = Gate("write")
    futures = []

    def save():
        futures.append(
            eqx_ckpt.tree_serialise_leaves_async(
                tmp_path / "new", tree, staging_bytes=MIB, progress=gate
            )
        )

    caller = threading.Thread(target=save)
    caller.start()
    assert gate.reached.wait(60)
    caller.join(0.2)
    assert caller.is_alive()  # Most of the tree is not staged yet.
    gate.opened.set()
    caller.join()
    futures[0].result()
    assert_same(eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", tree), tree)


def test_many_at_once(tmp_path):
    trees = [{"w": np.full(MIB, i, np.uint8), "i": i} for i in range(8)]
    saves = [
        eqx_ckpt.tree_serialise_leaves_async(
            tmp_path / str(i), tree, staging_bytes=2 * MIB
        )
        for i, tree in enumerate(trees)
    ]
    concurrent.futures.wait(saves)
    for i, tree in enumerate(trees):
        restored = eqx_ckpt.tree_deserialise_leaves(tmp_path / str(i), tree)
        assert_same(restored, tree)


def test_a_kept_future_keeps_no_array(tmp_path):
    array = np.ones(1000)
    died = weakref.ref(array)
    saving = eqx_ckpt.tree_serialise_leaves_async(tmp_path / "new", {"a": array})
    saving.result()
    del array
    gc.collect()
    assert died() is None
    assert saving.done()


MEMORY = """
    import ctypes, gc, json, os, pathlib, sys
    import jax.numpy as jnp, numpy as np
    import eqx_ckpt

    def memory(key):
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith(key)) / 1024

    def settled():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return memory("VmRSS")

    def save(tree, **kwargs):
        path = f"{sys.argv[1]}/ckpt"
        eqx_ckpt.tree_serialise_leaves_async(
            path, tree, overwrite=True, **kwargs
        ).result()

    small = {str(i): np.ones(2**15) for i in range(16)} | {"jax": jnp.ones(2**18)}
    for i in range(50):
        save(small)
        if i == 9:
            early = settled()
    late, threads = settled(), len(os.listdir("/proc/self/task"))
    large = {str(i): np.ones(2**20) for i in range(48)}
    before = settled()
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    save(large, staging_bytes=64 * 2**20)
    print(json.dumps([late - early, memory("VmHWM") - before, threads]))
"""


@pytest.mark.once
def test_memory_is_bounded_and_flat(tmp_path):
    done = run_python(MEMORY, str(tmp_path))
    assert done.returncode == 0, done.stderr
    grown, peak, threads = json.loads(done.stdout)
    assert grown < 40  # MiB, after 40 saves of 5 MiB
    assert peak < 200  # MiB, in a save of 384 MiB
    assert threads < 100


def broken_disk(tmp_path):
    """An async save whose disk goes away before its commit; its future is not held."""
    gate = Gate("commit")
    folder = tmp_path / "folder"
    eqx_ckpt.tree_serialise_leaves_async(folder / "new", jnp.ones(3), progress=gate)
    assert gate.reached.wait(60)
    shutil.rmtree(folder)
    gate.opened.set()


def test_a_failure_is_in_the_future(tmp_path):
    gate = Gate("commit")
    saving = eqx_ckpt.tree_serialise_leaves_async(
        tmp_path / "folder/new", jnp.ones(3), progress=gate
    )
    assert gate.reached.wait(60)
    shutil.rmtree(tmp_path / "folder")
    gate.opened.set()
    with pytest.raises(FileNotFoundError):
        saving.result()
    # It has been seen, and does not come again.
    eqx_ckpt.tree_serialise_leaves_async(tmp_path / "next", jnp.ones(3)).result()


@pytest.mark.parametrize(
    "save", [eqx_ckpt.tree_serialise_leaves, eqx_ckpt.tree_serialise_leaves_async]
)
def test_a_failure_that_nobody_saw_is_raised_by_the_next_save(tmp_path, save):
    broken_disk(tmp_path)
    while any(t.name.startswith("eqx_ckpt") for t in threading.enumerate()):
        pass
    with pytest.raises(FileNotFoundError) as raised:
        save(tmp_path / "next", jnp.ones(3))
    assert "folder/new" in raised.value.__notes__[0]
    assert not (tmp_path / "next").exists()
    eqx_ckpt.tree_serialise_leaves(tmp_path / "next", jnp.ones(3))


def test_what_is_wrong_with_the_arguments_is_raised_at_once(tmp_path):
    save = eqx_ckpt.tree_serialise_leaves_async
    with pytest.raises(eqx_ckpt.CheckpointError, match="'w' has the dtype"):
        save(tmp_path / "new", {"w": np.array([object()])})
    with pytest.raises(eqx_ckpt.CheckpointError, match="metadata"):
        save(tmp_path / "new", 1, metadata={1, 2})
    with pytest.raises(ValueError, match="`staging_bytes` is 0"):
        save(tmp_path / "new", 1, staging_bytes=0)
    save(tmp_path / "new", 1).result()
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="exists already"):
        save(tmp_path / "new", 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new"]


# What is logged while the interpreter waits for a save also sets `said`.
LISTENING = """
    import logging, threading

    class Listener(logging.StreamHandler):
        def emit(self, record):
            super().emit(record)
            said.set()

    said = threading.Event()
    logging.getLogger("eqx_ckpt").addHandler(Listener())
"""

PENDING = f"""
    {LISTENING}
    import sys
    import jax.numpy as jnp
    import eqx_ckpt
    from eqx_ckpt._saving import background_save as _futures

    _futures._PATIENCE = 0.1

    def slowly(phase, leaf, done, total):
        if phase == "commit":
            {{then}}

    path = sys.argv[1]
    eqx_ckpt.tree_serialise_leaves_async(path, jnp.ones(3), progress=slowly)
"""


def test_the_interpreter_waits_for_a_save_and_says_so(tmp_path):
    done = run_python(PENDING.format(then="said.wait(50)"), str(tmp_path / "new"))
    assert done.returncode == 0, done.stderr
    assert "Waiting for the save of" in done.stderr
    eqx_ckpt.inspect.verify(tmp_path / "new")


@pytest.mark.once
def test_the_last_save_removes_what_is_not_kept_when_the_interpreter_ends(tmp_path):
    program = """
    import sys, time
    import eqx_ckpt

    def last(steps):
        time.sleep(0.3)  # By then, the interpreter ends.
        return [max(steps)]

    manager = eqx_ckpt.CheckpointManager(sys.argv[1], keep=last)
    manager.save(1, 1).result()
    manager.save(2, 2)
    """
    done = run_python(program, str(tmp_path / "run"))
    assert done.stderr == ""
    assert eqx_ckpt.CheckpointManager(tmp_path / "run").steps() == [2]


def test_a_failure_that_nobody_saw_is_shown_at_the_end(tmp_path):
    program = PENDING.format(then="raise OSError('the disk is gone')")
    done = run_python(program, str(tmp_path / "new"))
    assert "OSError: the disk is gone" in done.stderr
    assert "nobody had asked" in done.stderr
    assert not list(tmp_path.iterdir())


def test_ctrl_c_at_the_end_gives_up_and_leaves_nothing(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "old", jnp.ones(3))
    program = (
        LISTENING
        + """
    import os, signal, sys
    import numpy as np
    import eqx_ckpt
    from eqx_ckpt._saving import background_save as _futures

    def interrupt(phase, leaf, done, total):
        if not hits:
            hits.append(leaf)
            said.wait(50)
            os.kill(os.getpid(), signal.SIGINT)
            given_up.wait(50)

    def give_up(error):
        give_up_first(error)
        given_up.set()

    hits, given_up = [], threading.Event()
    _futures._PATIENCE = 0.1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tree = {str(i): np.ones(2**20) for i in range(64)}
    saving = eqx_ckpt.tree_serialise_leaves_async(sys.argv[1], tree, progress=interrupt)
    give_up_first, saving.give_up = saving.give_up, give_up
    """
    )
    done = run_python(program, str(tmp_path / "new"))
    assert "The save was given up" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    eqx_ckpt.inspect.verify(tmp_path / "old")


@pytest.fixture
def _ctrl_c():
    """Shells let their background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_in_a_save_leaves_what_was_there(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", jnp.zeros(3))

    def interrupt(*_):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        eqx_ckpt.tree_serialise_leaves(
            tmp_path / "new", jnp.ones(3), overwrite=True, progress=interrupt
        )
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
    restored = eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", jnp.ones(3))
    assert restored.sum() == 0


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_while_the_data_are_staged_leaves_nothing(tmp_path):
    main = threading.get_ident()
    hit = threading.Event()

    def interrupt(*_):
        if not hit.is_set():
            hit.set()
            signal.pthread_kill(main, signal.SIGINT)

    tree = {str(i): np.ones(MIB) for i in range(32)}
    with pytest.raises(KeyboardInterrupt):
        eqx_ckpt.tree_serialise_leaves_async(
            tmp_path / "new", tree, staging_bytes=1, progress=interrupt
        )
    assert not list(tmp_path.iterdir())
    eqx_ckpt.tree_serialise_leaves_async(tmp_path / "new", tree).result()


def test_a_save_leaves_the_processor_to_the_training(tmp_path):
    def niceness():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found = []
    eqx_ckpt.tree_serialise_leaves_async(
        tmp_path / "new", jnp.ones(3), progress=lambda *_: found.append(niceness())
    ).result()
    assert {*found} == {niceness() + 5}


FORK = """
    import os, sys, threading
    import jax.numpy as jnp
    import eqx_ckpt
    from eqx_ckpt._saving import background_save as _futures

    def end(status):
        # As the interpreter would, but without what others do when it ends.
        _futures._finish()
        os._exit(status)

    path, way = sys.argv[1:]
    reached, gate = threading.Event(), threading.Event()

    def wait(*_):
        reached.set()
        gate.wait(60)

    eqx_ckpt.tree_serialise_leaves("memory://used", jnp.ones(3))  # By TensorStore.
    manager = eqx_ckpt.CheckpointManager(path, progress=wait)
    manager.save(1, jnp.ones(3))
    reached.wait(60)
    pid = os.fork()
    if pid == 0:
        gate.set()
        try:
            if way == "database":
                other = eqx_ckpt.CheckpointManager(path, layout="ocdbt")
                other.save(2, jnp.ones(3)).result()
            manager.save(2, jnp.ones(3)).result() if way == "save" else manager.close()
        except eqx_ckpt.CheckpointError as e:
            assert "forked" in str(e), e
            assert eqx_ckpt.CheckpointManager(path).steps() == []
            end(7)
        end(8)
    _, status = os.waitpid(pid, 0)
    gate.set()
    manager.close()
    print(os.waitstatus_to_exitcode(status), manager.steps(), sorted(os.listdir(path)))
"""


@pytest.mark.parametrize(
    ("way", "status", "steps"),
    [("database", 7, [1]), ("close", 8, [1]), ("save", 8, [1, 2])],
)
def test_a_forked_child_harms_nobody(tmp_path, way, status, steps):
    done = run_python(FORK, str(tmp_path / "run"), way)
    names = [f"{step:06d}" for step in steps]
    assert done.stdout == f"{status} {steps} {names}\n", done.stderr


FORKED = """
    import os, sys
    import numpy as np
    import eqx_ckpt

    folder, like = sys.argv[1], {"w": np.zeros(100)}
    for name, kind in {
        "plain": {}, "packed": {"compression": "zstd"}, "database": {"layout": "ocdbt"}
    }.items():
        eqx_ckpt.tree_serialise_leaves(f"{folder}/{name}", like, **kind)
    if os.fork() == 0:
        for name in ("plain", "packed"):
            eqx_ckpt.tree_deserialise_leaves(f"{folder}/{name}", like)
        eqx_ckpt.tree_serialise_leaves(f"{folder}/again", like, compression="zstd")
        try:
            eqx_ckpt.tree_deserialise_leaves(f"{folder}/database", like)
        except eqx_ckpt.CheckpointError as e:
            assert "forked" in str(e), e
        else:
            os._exit(8)
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_forked_child_restores_what_needs_no_tensorstore(tmp_path):
    done = run_python(FORKED, str(tmp_path))
    assert done.stdout == "7\n", done.stderr
