"""Several processes that do not all call the same, or read the same."""

import pathlib
import signal
import socket
import subprocess
import sys

import pytest

import eqx_ckpt
from faults import calls, jobs
from faults.zygote import Zygote


def test_calls_out_of_order_are_named(zygote: Zygote, disk: pathlib.Path) -> None:
    ends = zygote.call(jobs.values, 2, 4, calls.out_of_order, str(disk / "run"))
    for who, (errors, steps) in enumerate(ends):
        assert steps == list(range(1, 9))
        assert errors.keys() == {"latest", "should_save", "restore"}
        for name, (kind, text) in errors.items():
            assert kind == "CheckpointError"
            assert text.startswith("The processes do not call the same:\n")
            assert f"\n- process {who}: {name}(" in text
            assert f"\n- process {1 - who}: save(" in text


def test_the_service_forgets_what_has_failed(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    for counts in zygote.call(jobs.values, 2, 4, calls.keep_errors, str(disk)):
        assert max(counts) < 20, counts


def test_one_version_is_read(zygote: Zygote, disk: pathlib.Path) -> None:
    ends = zygote.call(jobs.values, 2, 4, calls.read_two_versions, str(disk))
    for kind, text in ends:
        assert kind == "CheckpointError"
        assert (
            "Process 1 sees a different checkpoint than process 0 in restore(" in text
        )
        assert "from one shared directory, or one store" in text


def test_one_average_is_read(zygote: Zygote, disk: pathlib.Path) -> None:
    args = (2, 4, calls.read_other_averages, str(disk))
    for ends in zygote.call(jobs.values, *args):
        assert [kind for kind, _ in ends] == ["CheckpointError"] * 4
        assert "by [0.25, 0.5]" in ends[0][1]
    assert not (disk / "copy").exists()


def test_a_restore_fails_on_one(zygote: Zygote, disk: pathlib.Path) -> None:
    args = (2, 4, calls.restore_what_fails_on_one, str(disk))
    first, second = zygote.call(jobs.values, *args)
    for once in ("", " once"):
        for name, kind in {"plan": "LeafMismatch", "lag": "CheckpointNotFound"}.items():
            assert first[name + once][0] == second[name + once][0] == f"{kind}Error"
        assert first["plan" + once][1].startswith("Process 1 failed: ")
        assert first["lag" + once][1] == second["lag" + once][1]
        begin = "Process 1 does not see, or not yet, the checkpoint that process 0 sees"
        assert first["lag" + once][1].startswith(begin)
    for kind, text in (first["late"], second["late"]):
        assert kind == "CheckpointError"
        assert "No answer from process 1 of 2 within 2 seconds" in text
    assert second["late because"] == ("CorruptCheckpointError", "This is damaged.")


@pytest.mark.once
def test_a_restore_is_late_on_the_first(zygote: Zygote, disk: pathlib.Path) -> None:
    """It fails there too, although all that it reads is there."""
    program = calls.restore_late_on_the_first
    for kind, text in zygote.call(jobs.values, 4, 2, program, str(disk)):
        assert kind == "CheckpointError"
        assert text.startswith(
            "No answer from process 0 of 4 within 2 seconds (restore"
        )
        assert "Nothing was restored by this call." in text


def test_removing_old_steps_may_take_long(zygote: Zygote, disk: pathlib.Path) -> None:
    """As long as it goes on; if not, all are told so."""
    ends = zygote.call(jobs.values, 2, 4, calls.retain_slowly, str(disk))
    for first, saved, _ in ends:
        assert first == [4]
        assert saved[0] == "CheckpointError"
        assert saved[1].startswith("No answer from process 0 of 2 within ")
        assert "Step 5 was saved; whether older steps were removed" in saved[1]
        assert "Nothing was saved" not in saved[1]
    assert ends[0][2] == [5]


def test_looking_for_an_intact_step_may_take_long(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    """As long as it goes on."""
    ends = zygote.call(jobs.values, 2, 4, calls.fall_back_slowly, str(disk))
    assert ends == [(1, 2), (1, 2)]


@pytest.mark.once
def test_a_deadline_passes_during_an_answer(zygote: Zygote, disk: pathlib.Path) -> None:
    """It fails in all, and in none alone."""
    ends = zygote.call(jobs.values, 4, 2, calls.give_up_on_an_answer, str(disk))
    for (kind, text), then in ends:
        assert kind == "CheckpointError"
        assert text.startswith("No answer from process 0 of 4 within ")
        assert then == 1


def test_delete(zygote: Zygote, disk: pathlib.Path) -> None:
    ends = zygote.call(jobs.values, 2, 4, calls.delete, str(disk / "run"))
    for who, (errors, steps) in enumerate(ends):
        assert steps == [1, 3]
        assert {name: kind for name, (kind, _) in errors.items()} == {
            "gone": "CheckpointNotFoundError",
            "different": "CheckpointError",
            "no step": "ValueError",
            "read": "CheckpointError",
        }
        assert "The steps there are 1, 3." in errors["gone"][1]
        for process, step in enumerate((1, 3)):
            line = f"\n- process {process}: delete({step}) in "
            assert line in errors["different"][1]
        assert "-1 is not a step" in errors["no step"][1]
        assert "Step 3 is being read, and was not deleted" in errors["read"][1]
        is_told = errors["read"][1].startswith("Process 1 failed: ")
        assert is_told == (who == 0)


@pytest.mark.once
def test_one_of_three_is_late(zygote: Zygote, disk: pathlib.Path) -> None:
    """The others are told who, at once; the next common call works."""
    ends = zygote.call(jobs.values, 3, 1, calls.late, str(disk / "run"))
    for who, (errors, (keys, *steps)) in enumerate(ends):
        assert steps == [1, 2, 3]
        # Of the last save alone, although what a call told was withdrawn with it.
        assert keys < 18
        if who < 2:
            kind, text, seconds = errors["late"]
            assert kind == "CheckpointError"
            assert text.startswith("No answer from process 2 of 3 within 2 seconds")
            assert seconds < calls.LONG_MARGIN
        else:
            assert "No answer from process 0 and process 1" in errors["alone"][1]
            # Its own error is not lost.
            assert "-1 is not a step" in errors["wrong"][1]


def test_what_failed_before_a_match_is_forgotten(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    ends = zygote.call(jobs.values, 2, 1, calls.call_once_more, str(disk / "run"))
    assert ends == [[2, 2], [2, 2]]


def test_a_process_is_replaced(zygote: Zygote, disk: pathlib.Path) -> None:
    programs = [
        (1, 1, calls.replaced, str(disk), index, life)
        for index, life in ((0, 1), (1, 1), (1, 2))
    ]
    first, _, second = zygote.call(jobs.at_once, programs)
    for (end,) in (first, second):
        assert end.value is not None, end.error
        keys, steps = end.value
        assert steps == [1, 2, 3, 4]
        assert keys < 18


SCRIPT = """
import sys, threading, time
import jax
address, index, directory, ending = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(
    address, 2, int(index), coordinator_bind_address=address
)
import eqx_ckpt, numpy as np
from eqx_ckpt._distributed import jax_service as coordination
from eqx_ckpt._storage.chunks.chunk_files import ChunkFiles

write, shut_down, forgotten = ChunkFiles.write, threading.Event(), threading.Event()
client = coordination._client()

def slowly(*args, **kwargs):
    # The other process waits in a call, which the shutdown cancels.
    if ending == "shutdown" and index == "1":
        shut_down.wait()
    time.sleep(1)
    return write(*args, **kwargs)

ChunkFiles.write = slowly
coordination._client = lambda: None if forgotten.is_set() else client
manager = eqx_ckpt.CheckpointManager(directory)
manager.save(3, {"w": np.arange(4)})
if ending == "shutdown":
    jax.distributed.shutdown()
    shut_down.set()
    # JAX forgets the client last, as a busy machine shows.
    time.sleep(2)
    forgotten.set()
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x"))
    tree = {"g": jax.make_array_from_callback((4,), sharding, np.ones(4).__getitem__)}
    try:
        eqx_ckpt.tree_serialise_leaves(directory + "/later", tree)
    except eqx_ckpt.CheckpointError as e:
        print(e, file=sys.stderr)
"""


@pytest.mark.parametrize("ending", ["none", "shutdown"])
def test_the_last_save_of_a_script(tmp_path: pathlib.Path, ending: str) -> None:
    """It is finished, or it is said that it cannot be."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*reserved.getsockname())
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, address, str(i), tmp_path / "a", ending],
                stderr=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        outputs = [process.communicate(timeout=120)[1] for process in processes]
    run = eqx_ckpt.CheckpointManager(tmp_path / "a")
    if ending == "none":
        assert [process.returncode for process in processes] == [0, 0], outputs
        assert run.latest() == 3
        return
    assert run.latest() is None
    for output in outputs:
        assert "`jax.distributed.shutdown()` was called before this call" in output
        assert "'g' is on devices of other processes: save before" in output


def test_a_process_dies_while_replicas_are_sent(
    zygote: Zygote, disk: pathlib.Path
) -> None:
    """JAX says what failed, and not in which process."""
    ends = zygote.call(jobs.run, 2, 4, calls.die_while_sending, str(disk))
    (kind, text), (cause, _) = ends[0].value
    assert ends[1].signal == signal.SIGKILL
    assert kind == "CheckpointError"
    assert text.startswith("No answer from process 1 of 2 within ")
    assert "Nothing was restored by this call." in text
    assert cause == "JaxRuntimeError"
