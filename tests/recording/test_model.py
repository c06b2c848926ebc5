"""Any sequence of operations on a recording, against lists of what must be there."""

import contextlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis
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
from eqx_ckpt.recording import record_scan, Recording, Samples
from helpers import full_disk
from recording import draws
from recording.draws import LIKE, WATCH
from recording.expected import Draw, Expected
from versions import thinned


BLOCK = 3
_SAFE = re.compile(r"(\d+) draws are safe")
counts = st.integers(1, draws.MOST)
mosts = st.sampled_from([None, 5, 30])
WAYS = st.sampled_from(["commit", "close", "recorder", "scan"])


class Machine(RuleBasedStateMachine):
    chains: int | None = None
    axis: AxisType | None = None

    @initialize(most=mosts)
    def begin(self, most):
        self.directory = tempfile.mkdtemp()
        self.path = f"{self.directory}/run"
        self.expected = Expected()
        self.next = 0
        self.stack = contextlib.ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("eqx_ckpt.recording._writing._commit_pace.clock", WATCH.clock)
        self.place = None
        if self.axis is not None:
            mesh = jax.make_mesh((4,), ("d",), (self.axis,), devices=jax.devices()[:4])
            self.stack.enter_context(jax.set_mesh(mesh))
            self.place = NamedSharding(mesh, P("d"))
        self.open(most)

    def open(self, most: int | None) -> None:
        self.recording = Recording(
            self.path, LIKE, chains=self.chains, max_samples=most, chunk_bytes=48
        )
        expected = self.expected
        expected.open(most)
        self.recorder = self.older = None
        assert self.recording.committed == (
            None if expected.committed is None else len(expected.committed)
        )
        if expected.state is not None:
            with pytest.raises(eqx_ckpt.CheckpointError, match="`resume`"):
                self.recording.extend(self.block(self.numbered([1])))
            self.resume()

    def resume(self) -> None:
        like = jax.tree.map(lambda x: x * 0, self.expected.state)
        found = self.recording.resume(like)
        jax.tree.map(np.testing.assert_array_equal, found, self.expected.state)
        assert self.recording.steps == self.expected.steps

    def numbered(self, numbers) -> list[Draw]:
        return draws.draws_of(numbers, self.chains)

    def block(self, some: list[Draw]) -> dict[str, np.ndarray]:
        return draws.block(some, self.chains)

    def new(self, count: int) -> int:
        first, self.next = self.next, self.next + count
        return first

    def is_refused(self, call: Callable[[], Any]) -> bool:
        """Whether samples were refused before: this call then only raises that."""
        error, self.expected.refused = self.expected.refused, ""
        if error:
            with pytest.raises(eqx_ckpt.CheckpointError, match=error):
                call()
        return bool(error)

    def take(self, some: list[Draw], call: Callable[[], Any]) -> None:
        """Record draws by a call, which raises if they do not fit."""
        if not self.is_refused(call):
            self.expected.take(some)
            if not self.is_refused(call):
                call()

    def new_recorder(self) -> Any:
        return self.recording.recorder(block=BLOCK, sharding=self.place)

    @rule(form=st.sampled_from(draws.FORMS), count=counts)
    def save(self, form, count):
        if self.chains is None and form in ("vmap", "each"):
            form = "while"
        count += count % 2 if form == "each" else 0
        first = self.new(count)
        if self.recorder is None:
            # What programs send meanwhile is in no order with what these save.
            jax.effects_barrier()
            if self.is_refused(self.new_recorder):
                return
            self.recorder, self.expected.failed = self.new_recorder(), False
        run = draws.program(form, self.chains)
        before = None if form == "donated" else self.recorder
        self.recorder = run(self.recorder, jnp.int32(first), jnp.int32(count))
        some = draws.saved(form, first, count, self.chains)
        has_sent = self.expected.save(some, BLOCK)
        # One that has sent fewer blocks than the newest.
        self.older = before if has_sent else None if before is None else self.older

    @precondition(lambda self: self.recorder is not None)
    @rule()
    def flush(self):
        self.recorder = jax.jit(lambda recorder: recorder.flush())(self.recorder)
        self.expected.flush()
        assert bool(jnp.any(self.recorder.failed)) == self.expected.failed

    @precondition(lambda self: self.older is not None)
    @rule()
    def use_an_older_recorder(self):
        first = self.new(BLOCK)
        run = draws.program("while", self.chains)
        self.recorder = run(self.older, jnp.int32(first), jnp.int32(BLOCK))
        assert jnp.all(self.recorder.failed)
        self.expected.refuse("older recorder")
        self.expected.device = []
        self.recorder = self.older = None

    @rule(
        count=counts,
        kind=st.sampled_from(["numpy", "jax", "sharded"]),
        keep=st.sampled_from([None, "half", "each"]),
    )
    def extend(self, count, kind, keep):
        count += count % 2
        first = self.new(count)
        some = self.numbered(range(first, first + count))
        samples = self.block(some)
        kept = None
        if keep == "half":
            kept = np.arange(count) % 2 == 0
            some = some[::2]
        elif keep == "each":
            parity = first if self.chains is None else np.arange(self.chains)[:, None]
            kept = np.arange(first, first + count) % 2 == parity % 2
            some = draws.apart(first, count, self.chains) if self.chains else some[::2]
        if kind == "sharded" and self.place is not None:
            samples = jax.device_put(samples, self.place)
        elif kind != "numpy":
            samples = jax.tree.map(jnp.asarray, samples)
        self.take(some, lambda: self.recording.extend(samples, kept))

    @rule()
    def append(self):
        some = self.numbered([self.new(1)])
        one = draws.sample(jnp.asarray(some[0]))
        self.take(some, lambda: self.recording.append(one))

    @rule(with_state=st.booleans())
    def commit(self, with_state):
        state = {"n": self.next} if with_state else None
        self.expected.commit_failed = True
        if self.is_refused(lambda: self.recording.commit(state)):
            return
        problem = r"recorder\.flush" if self.expected.device else ""
        if not problem and with_state and self.expected.has_gap:
            problem = "lacks samples before"
        if problem:
            with pytest.raises(eqx_ckpt.CheckpointError, match=problem):
                self.recording.commit(state)
            return
        self.recording.commit(state)
        self.expected.commit(state)

    @precondition(lambda self: not self.expected.device and not self.expected.has_gap)
    @rule(
        count=st.sampled_from([1, 5, 8, 21]),
        every=st.integers(0, 7),
        seconds=st.sampled_from([None, None, 0.0, 4.0, 30.0]),
        each=st.sampled_from([1.0, 3.0, 50.0]),
        block=st.sampled_from([None, 2, 5]),
        thin=st.sampled_from([1, 1, 2]),
        keep=st.sampled_from([None, None, draws.is_even]),
    )
    def scan(self, count, every, seconds, each, block, thin, keep):
        length, expected = count * thin, self.expected
        first = self.new(length)
        state = draws.begin_scan(first, self.chains)
        if self.place is not None:
            state["n"] = jax.device_put(state["n"], self.place)
        options = {"thin": thin, "keep": keep, "block": block, "commit_every": every}

        def call() -> Any:
            return record_scan(
                draws.step,
                state,
                length=length,
                recording=self.recording,
                **options,
                commit_every_seconds=seconds,
            )

        numbers = range(first + thin - 1, first + length, thin)
        kept = [keep is None or (n + 1) % 2 == 0 for n in numbers]
        fits = expected.room(sum(kept))
        steps = length
        if fits < sum(kept):
            steps = thin * np.flatnonzero(np.cumsum(kept) > fits)[0]
        some = [n for n, is_kept in zip(numbers, kept, strict=True) if is_kept]
        WATCH.begin(first, each, lambda: self.recording.steps)
        if steps < length:
            with pytest.raises(eqx_ckpt.CheckpointError, match="`max_samples` is"):
                call()
        else:
            found = call()
        if every:
            assert WATCH.lost < max(every, thin)
        if seconds is not None:
            # How long two samples take is not known before they are computed.
            assert WATCH.lost * each < seconds + 3 * thin * each
        if steps:
            expected.take(self.numbered(some[:fits]))
            after = {"i": state["i"] + steps, "n": state["n"] + steps}
            expected.commit(after, int(steps))
            self.resume()
        if steps == length:
            jax.tree.map(np.testing.assert_array_equal, found, expected.state)

    @rule(most=mosts)
    def close_and_continue(self, most):
        self.close()
        self.open(most)

    def close(self) -> None:
        expected, recorder = self.expected, self.recorder
        error = expected.refused or (expected.device and "lacks its last")
        is_dropped = expected.close()
        if is_dropped and expected.commit_failed:
            is_dropped, error = False, "are dropped.*had failed"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if error:
                with pytest.raises(eqx_ckpt.CheckpointError, match=error):
                    self.recording.close()
            else:
                self.recording.close()
        assert is_dropped == any("are dropped" in str(w.message) for w in caught)
        if recorder is not None:
            assert jnp.all(
                draws.program("while", self.chains)(
                    recorder, jnp.int32(0), jnp.int32(BLOCK)
                ).failed
            )

    @rule(most=mosts)
    def die_and_continue(self, most):
        self.recording._log.abandon()
        self.open(most)

    def record_and_end(self, way: str, first: int, count: int) -> None:
        """Record draws in one of several ways, and commit or end."""
        if way == "scan":
            state = draws.begin_scan(first, self.chains)
            WATCH.begin(first, 1.0, lambda: self.recording.steps)
            record_scan(
                draws.step,
                state,
                length=count,
                recording=self.recording,
                commit_every=2,
            )
        elif way == "recorder":
            recorder = self.new_recorder()
            run = draws.program("while", self.chains)
            run(recorder, jnp.int32(first), jnp.int32(count)).flush()
            self.recording.commit()
        else:
            self.recording.extend(
                self.block(self.numbered(range(first, first + count)))
            )
            self.recording.commit() if way == "commit" else self.recording.close()

    def close_after(self, error: BaseException | None) -> None:
        """Close; after an error, samples that no state follows are dropped."""
        before = self.recording.committed
        try:
            self.recording.close()
        except (OSError, eqx_ckpt.CheckpointError):
            assert error is not None
        assert error is None or self.recording.committed == before

    def end(self, way: str, count: int) -> BaseException | None:
        """Record draws where this may fail: the end says what is safe, and is right."""
        first, expected = self.new(count), self.expected
        some = self.numbered(range(first, first + count))
        before, kept = len(expected.committed or []), len(expected.taken)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.record_and_end(way, first, count)
                error, safe = None, kept + count
            except OSError as e:
                error, safe = e, int(_SAFE.findall(str(e))[0])
            self.close_after(error)
        is_dropped = any("are dropped" in str(w.message) for w in caught)
        if error is None:
            assert is_dropped == (way == "close" and expected.state is not None)
        expected.taken += some[: max(0, safe - kept)]
        if way == "scan" and safe > kept:
            steps = safe - kept
            state = draws.begin_scan(first + steps, self.chains)
            expected.commit(state, steps)
        elif error is None and not is_dropped:
            expected.commit()
        elif error is not None:
            assert safe in (before, 0)
        return error

    @precondition(lambda self: not self.expected.device and not self.expected.has_gap)
    @rule(count=counts, way=WAYS, limit=st.sampled_from([0, 0, 60, 400, 1500]))
    def fill_the_disk_and_continue(self, count, way, limit):
        if self.expected.room(count) < count:
            return
        with full_disk(limit):
            error = self.end(way, count)
        assert error is not None or limit or way == "close"
        self.open(None)

    @precondition(lambda self: not self.expected.device and not self.expected.has_gap)
    @rule(count=counts)
    def fail_to_write_once(self, count):
        """The disk has room again before the commit."""
        expected, first = self.expected, self.new(count)
        before = len(expected.committed or [])
        some = self.numbered(range(first, first + count))
        if expected.room(count) < count:
            return
        safe = ""
        try:
            with full_disk(0):
                self.recording.extend(self.block(some))
                # Until the thread has tried to write what fills chunks.
                self.recording._log._writer.drain()
            self.recording.commit()
        except OSError as e:
            (safe,) = _SAFE.findall(str(e))
        else:
            expected.take(some)
            expected.commit()
        assert safe in ("", str(before))
        self.recording.close()
        self.open(None)

    @precondition(lambda self: not self.expected.device and not self.expected.has_gap)
    @rule(count=counts, way=WAYS, what=st.sampled_from(["", "/samples"]))
    def delete_the_folder_and_begin_again(self, count, way, what):
        if self.expected.room(count) < count:
            return
        # What needs no commit, and is dropped, is not looked for.
        is_dropped = way == "close" and self.expected.state is not None
        # The thread that writes may still make files.
        while os.path.exists(self.path + what):
            shutil.rmtree(self.path + what, ignore_errors=True)
        error = self.end(way, count)
        assert is_dropped or isinstance(error, FileNotFoundError)
        shutil.rmtree(self.path, ignore_errors=True)
        self.expected = Expected()
        self.open(None)

    @precondition(lambda self: self.expected.committed)
    @rule(
        start=st.integers(0, 5),
        stop=st.none() | counts,
        thin=st.integers(1, 3),
        chain=st.integers(0, 2),
    )
    def read(self, start, stop, thin, chain):
        """Also while a program records."""
        committed = self.expected.committed
        assert committed is not None
        start = min(start, len(committed))
        stop = len(committed) if stop is None else min(start + stop, len(committed))
        wanted = self.block(committed[start:stop:thin])
        found = self.recording.samples.read(start=start, stop=stop, thin=thin)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        if self.chains is not None:
            n = Samples(self.path).read(where=lambda t: t["n"], chain=chain)
            assert n.tolist() == [int(draw[chain]) for draw in committed]

    @invariant()
    def what_is_committed_is_there(self):
        samples = Samples(self.path)
        committed = self.expected.committed
        if committed is None:
            assert samples.committed is None
        else:
            found, wanted = samples.read(), self.block(committed)
            jax.tree.map(np.testing.assert_array_equal, found, wanted)

    def teardown(self):
        if hasattr(self, "recording"):
            self.recording._log.abandon()
            jax.effects_barrier()
            self.stack.close()
            shutil.rmtree(self.directory)


def run(machine: type[Machine], seed: int, examples: int) -> None:
    run_state_machine_as_test(
        hypothesis.seed(seed)(machine),
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            database=None,
            deadline=None,
        ),
    )


@pytest.mark.parametrize(
    ("seed", "chains", "axis", "examples"),
    thinned(
        [
            (3, 4, AxisType.Auto, 8),
            (4, 4, AxisType.Explicit, 8),
            (2, 3, None, 8),
            # Chains share chunks.
            (5, 20, None, 8),
            (1, None, None, 30),
        ],
        5,
    ),
    ids=str,
)
def test_any_sequence(seed, chains, axis, examples):
    run(type("Of", (Machine,), {"chains": chains, "axis": axis}), seed, examples)
