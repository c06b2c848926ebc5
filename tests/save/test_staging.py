"""How much of the host's memory saves in the background take, and for how long."""

import concurrent.futures
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from support import (
    background_save as _futures,
    chunk_files,
    ChunkFiles,
    staging,
    write_plan,
)


PIECE = 2**18
MIB = 2**20


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The writer has 1 MiB on its way at most, so that the trees may be small."""
    concurrent.futures.wait(
        list(_futures.pending_saves)
    )  # They have a share of the bytes.
    for module in (chunk_files, staging):
        monkeypatch.setattr(module, "MAX_IN_FLIGHT", MIB)
    yield
    # One that waits for ever would let the interpreter wait too.
    concurrent.futures.wait(list(_futures.pending_saves), 30)
    for saving in [s for s in _futures.pending_saves if not s.done()]:
        saving.give_up(eqx_ckpt.CheckpointError("The test has failed."))


class Gate:
    """A `progress` that stops the writer when the first piece is written."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, phase, *_):
        if phase == "write":
            self.reached.set()
            self.opened.wait(60)


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


def pieces(n):
    return {str(i): np.full(PIECE, i, np.uint8) for i in range(n)}


def begin(*args, **kwargs):
    """Save in the background, and do not even wait for the data to be staged."""
    call = eqx_ckpt.tree_serialise_leaves_async
    thread = threading.Thread(target=call, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    return thread


def test_a_failed_save_gives_its_budget_back(tmp_path):
    def fail(*_):
        raise ZeroDivisionError

    for _ in range(4):
        saving = eqx_ckpt.tree_serialise_leaves_async(
            tmp_path / "failed", pieces(4), progress=fail
        )
        with pytest.raises(ZeroDivisionError):
            saving.result()
    caller = begin(tmp_path / "new", pieces(8), staging_bytes=1)
    caller.join(30)
    assert not caller.is_alive()


def test_the_limit_is_one_of_all_saves_together(tmp_path, gate):
    first = eqx_ckpt.tree_serialise_leaves_async(
        tmp_path / "first", pieces(8), staging_bytes=2 * MIB, progress=gate
    )
    assert gate.reached.wait(60)
    second = begin(tmp_path / "second", pieces(4), staging_bytes=2 * MIB)
    second.join(0.2)
    assert second.is_alive()
    gate.opened.set()
    second.join(60)
    assert not second.is_alive()
    first.result()


@pytest.fixture
def staged(monkeypatch):
    """The pieces that were made for the staging."""
    made = []
    shards = write_plan.shards

    def watched(*args, **kwargs):
        for region, array in shards(*args, **kwargs):
            made.append(array)
            yield region, array

    monkeypatch.setattr(write_plan, "shards", watched)
    return made


def test_bytes_count_until_they_are_written(tmp_path, gate, staged):
    caller = begin(tmp_path / "new", pieces(16), staging_bytes=MIB, progress=gate)
    assert gate.reached.wait(60)
    caller.join(0.2)
    # Five are allowed, one is written, and one waits for its turn.
    assert len(staged) <= 7
    gate.opened.set()
    caller.join(60)
    assert len(staged) == 16


def test_one_save_at_a_time_is_staged(tmp_path, monkeypatch):
    shards, inside, most = write_plan.shards, [], []
    together = threading.Event()

    def watched(*args, **kwargs):
        inside.append(1)
        most.append(len(inside))
        if len(inside) > 1:
            together.set()
        together.wait(0.2)
        yield from shards(*args, **kwargs)
        inside.pop()

    monkeypatch.setattr(write_plan, "shards", watched)
    callers = [begin(tmp_path / name, pieces(1)) for name in "ab"]
    for caller in callers:
        caller.join(60)
    assert most == [1, 1]


def test_what_is_copied(tmp_path, monkeypatch):
    write, written = ChunkFiles.write, {}

    def watched(chunks, arrays, pieces, *args, **kwargs):
        pieces = [*pieces]
        written.update((piece.name, piece.array) for piece in pieces)
        return write(chunks, arrays, pieces, *args, **kwargs)

    monkeypatch.setattr(ChunkFiles, "write", watched)
    tree = {"jax": jnp.arange(1000), "numpy": np.arange(1000)}
    eqx_ckpt.tree_serialise_leaves_async(tmp_path / "new", tree).result()
    assert np.shares_memory(written["jax"], np.asarray(tree["jax"]))
    assert not np.shares_memory(written["numpy"], tree["numpy"])
