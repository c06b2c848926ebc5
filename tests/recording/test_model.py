"""Any sequence of operations on a recording, against a list of what must be there."""

import contextlib
import functools
import os
import re
import resource
import shutil
import tempfile
import warnings
from collections.abc import Iterator

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    RuleBasedStateMachine,
    run_state_machine_as_test,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqx_ckpt
from eqx_ckpt import record_scan, Recording
from faults import jobs
from faults.zygote import Zygote
from recording import processes


LIKE = {"n": jnp.int32(0), "x": jnp.zeros(2)}
BLOCK = 3
counts = st.integers(1, 8)


def draws(n, chains, axis=()):
    """Samples that a number identifies, of one chain or of all of them."""
    lead = np.zeros((), np.int32) if chains is None else np.arange(chains) * 100_000
    lead = lead.reshape((*lead.shape, *(1 for _ in axis)))
    n = jnp.asarray(lead + n, jnp.int32)
    return {"n": n, "x": n[..., None] * 0.5 + jnp.array([0.0, 0.25])}


@functools.cache
def program(form: str, chains: int | None):
    """Saves the draws `first`, ..., `first + count - 1`, or some of them."""

    def save(recorder, n, keep=True):
        return recorder.save(draws(n, chains), keep)

    def loop(body):
        return lambda recorder, first, count: jax.lax.fori_loop(
            first, first + count, body, recorder
        )

    def scan(recorder, first, count):
        def body(recorder, i):
            return save(recorder, first + i, keep=i < count), None

        return jax.lax.scan(body, recorder, jnp.arange(8))[0]

    def cond(n, recorder):
        return jax.lax.cond(n % 2 == 0, lambda r: save(r, n), lambda r: r, recorder)

    def unrolled(recorder, first, count):
        for i in range(8):
            recorder = save(recorder, first + i, keep=i < count)
        return recorder

    def mapped(recorder, first, count):
        def one(recorder, chain):
            def body(i, recorder):
                n = (first + i + chain * 100_000).astype(jnp.int32)
                x = n[..., None] * 0.5 + jnp.array([0.0, 0.25])
                return recorder.save({"n": n, "x": x})

            return jax.lax.fori_loop(0, count, body, recorder)

        where = jax.typeof(recorder._count).sharding
        chain = jnp.arange(chains, dtype=jnp.int32)
        if AxisType.Explicit in where.mesh.axis_types:
            chain = jax.sharding.reshard(chain, where)
        return jax.vmap(one)(recorder, chain)

    forms = {
        "while": loop(lambda n, recorder: save(recorder, n)),
        "cond": loop(cond),
        "keep": loop(lambda n, recorder: save(recorder, n, keep=n % 2 == 0)),
        "scan": scan,
        "unrolled": unrolled,
        "vmap": mapped,
    }
    if form == "donated":
        return jax.jit(forms["while"], donate_argnums=0)
    return jax.jit(forms[form])


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let no file grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Machine(RuleBasedStateMachine):
    chains: int | None = None
    axis: AxisType | None = None
    # For jobs of two processes.
    zygote: Zygote | None = None
    jobs = 0

    @initialize()
    def begin(self):
        self.directory = tempfile.mkdtemp()
        self.path = f"{self.directory}/run"
        # What the last commit has, what is recorded, what is on the device.
        self.committed: list[int] | None = None
        self.state: int | None = None
        self.commit_failed = False
        self.taken: list[int] = []
        self.device: list[int] = []
        self.next = 0
        self.stack = contextlib.ExitStack()
        self.place = None
        if self.axis is not None:
            mesh = jax.make_mesh((4,), ("d",), (self.axis,), devices=jax.devices()[:4])
            self.stack.enter_context(jax.set_mesh(mesh))
            self.place = NamedSharding(mesh, P("d"))
        self.open()

    def open(self):
        self.recording = Recording(self.path, LIKE, chains=self.chains, chunk_bytes=48)
        self.taken = list(self.committed or [])
        self.device = []
        self.commit_failed = False
        self.recorder = None
        assert self.recording.committed == (
            None if self.committed is None else len(self.committed)
        )
        if self.state is not None:
            with pytest.raises(eqx_ckpt.CheckpointError, match="`resume`"):
                self.recording.extend(self.block([1]))
            assert self.recording.resume({"n": 0}) == {"n": self.state}

    def block(self, numbers):
        return draws(np.array(numbers), self.chains, ("draw",))

    def new(self, count):
        first, self.next = self.next, self.next + count
        return list(range(first, first + count))

    @rule(
        form=st.sampled_from(
            ["while", "cond", "keep", "scan", "unrolled", "vmap", "donated"]
        ),
        count=counts,
    )
    def save(self, form, count):
        if form == "vmap" and self.chains is None:
            form = "while"
        numbers = self.new(count)
        if self.recorder is None:
            self.recorder = self.recording.recorder(block=BLOCK, sharding=self.place)
        run = program(form, self.chains)
        self.recorder = run(self.recorder, jnp.int32(numbers[0]), jnp.int32(count))
        jax.effects_barrier()
        if form in ("cond", "keep"):
            numbers = [n for n in numbers if n % 2 == 0]
        self.device += numbers
        whole = len(self.device) // BLOCK * BLOCK
        self.taken += self.device[:whole]
        self.device = self.device[whole:]
        assert not jnp.any(self.recorder.failed)

    @precondition(lambda self: self.recorder is not None)
    @rule()
    def flush(self):
        self.recorder = jax.jit(lambda recorder: recorder.flush())(self.recorder)
        jax.effects_barrier()
        self.taken += self.device
        self.device = []

    @rule(count=counts, kind=st.sampled_from([np.asarray, jnp.asarray]))
    def extend(self, count, kind):
        numbers = self.new(count)
        self.recording.extend(jax.tree.map(kind, self.block(numbers)))
        self.taken += numbers

    @rule()
    def append(self):
        (number,) = numbers = self.new(1)
        self.recording.append(draws(number, self.chains))
        self.taken += numbers

    @rule(with_state=st.booleans())
    def commit(self, with_state):
        state = {"n": self.next} if with_state else None
        if self.device:
            with pytest.raises(eqx_ckpt.CheckpointError, match=r"recorder\.flush"):
                self.recording.commit(state)
            self.commit_failed = True
            return
        self.recording.commit(state)
        self.note(self.next if with_state else None)

    def note(self, state):
        self.committed, self.state = list(self.taken), state
        self.commit_failed = False

    @precondition(lambda self: not self.device)
    @rule(
        count=counts,
        every=st.integers(0, 5),
        seconds=st.sampled_from([None, None, 0.0]),
        block=st.none() | counts,
    )
    def scan(self, count, every, seconds, block):
        numbers = self.new(count)

        def step(n, _):
            return n + 1, draws(n, self.chains)

        options = {"commit_every": every, "commit_every_seconds": seconds}
        state = record_scan(
            step, self.recording, jnp.int32(numbers[0]), count, block=block, **options
        )
        self.taken += numbers
        assert self.recording.resume(0) == state == self.next
        self.recording.commit({"n": self.next})
        self.note(self.next)

    @rule()
    def close_and_continue(self):
        dropped = self.state is not None and len(self.taken) > len(self.committed)
        error = "lacks its last" if self.device else ""
        if dropped and self.commit_failed:
            dropped, error = False, "are dropped.*had failed"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if error:
                with pytest.raises(eqx_ckpt.CheckpointError, match=error):
                    self.recording.close()
            else:
                self.recording.close()
        assert dropped == any("are dropped" in str(w.message) for w in caught)
        if self.state is None and self.taken != (self.committed or []):
            self.committed = list(self.taken)
        self.open()

    @rule()
    def die_and_continue(self):
        self.recording.log.abandon()
        self.open()

    @precondition(lambda self: not self.device)
    @rule(count=counts)
    def fill_the_disk_and_continue(self, count):
        message = re.escape(f"{len(self.committed or [])} draws are safe")

        def fail() -> None:
            self.recording.extend(self.block(self.new(count)))
            self.recording.commit()

        with full_disk():
            with pytest.raises(OSError, match=message):
                fail()
            self.recording.close()
        self.open()

    @precondition(lambda self: not self.device)
    @rule(count=counts)
    def delete_the_folder_and_begin_again(self, count):
        shutil.rmtree(self.path)

        def fail() -> None:
            self.recording.extend(self.block(self.new(count)))
            self.recording.commit()

        with pytest.raises(FileNotFoundError, match="0 draws are safe"):
            fail()
        self.recording.close()
        assert not os.path.exists(self.path)
        self.committed = self.state = None
        self.open()

    @precondition(lambda self: self.zygote is not None and not self.device)
    @rule(count=counts)
    def go_on_in_two_processes(self, count):
        assert self.zygote is not None
        self.close_and_continue()
        self.recording.close()
        numbers = self.new(count)
        type(self).jobs += 1
        args = (
            self.path,
            LIKE,
            self.chains,
            self.block(numbers),
            self.state,
            self.next,
        )
        args = jax.tree.map(
            lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, args
        )
        assert self.zygote.call(jobs.values, 2, 2, processes.go_on, *args) == [
            None,
            None,
        ]
        self.taken += numbers
        self.note(self.next)
        self.open()

    @precondition(lambda self: self.committed)
    @rule(start=st.integers(0, 5), thin=st.integers(1, 3))
    def read(self, start, thin):
        committed = self.committed or []
        start = min(start, len(committed))
        found = self.recording.read(start=start, thin=thin)
        self.check(found, committed[start::thin])

    def check(self, found, numbers):
        expected = self.block(numbers)
        np.testing.assert_array_equal(found["n"], expected["n"])
        np.testing.assert_array_equal(found["x"], expected["x"])

    @invariant()
    def what_is_committed_is_there(self):
        samples = Recording.open(self.path)
        if self.committed is None:
            assert samples.committed is None
        else:
            self.check(samples.read(), self.committed)

    def teardown(self):
        if hasattr(self, "recording"):
            self.recording.log.abandon()
            self.stack.close()
            shutil.rmtree(self.directory)


def run(machine: type[Machine], examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=15,
            derandomize=True,
            database=None,
            deadline=None,
        ),
    )


@pytest.mark.parametrize(
    ("chains", "axis"),
    [(None, None), (3, None), (4, AxisType.Auto), (4, AxisType.Explicit)],
    ids=str,
)
def test_any_sequence(chains, axis):
    run(type("Of", (Machine,), {"chains": chains, "axis": axis}), 8)


@pytest.mark.slow
def test_any_sequence_with_jobs_of_two_processes(zygote):
    machine = type("Of", (Machine,), {"chains": 4, "zygote": zygote})
    run(machine, 12)
    assert machine.jobs > 2
