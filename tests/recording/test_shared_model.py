"""A recording in programs that are killed, and in jobs of two processes."""

import collections
import pathlib
import signal
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis.stateful import rule

import eqx_ckpt
from eqx_ckpt.recording import Recording
from faults import jobs
from faults.shim import Fault
from faults.zygote import Zygote
from recording import draws, processes
from recording.draws import LIKE
from recording.expected import Expected, Found
from recording.test_model import counts, Machine, run


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["extend", "append", "commit", "commit a state", "scan", "read"]
        ),
        counts,
    ),
    max_size=6,
)


class Shared(Machine):
    """Other processes continue the recording, and this one goes on after them."""

    chains = 4
    zygote: Zygote
    ends: collections.Counter[str]

    def leave(self) -> None:
        self.close()
        self.expected.open(None)

    def planned(self, operations: Any) -> tuple[list[Any], list[list[Found]]]:
        """Operations for `processes.perform`, and what may be found after each commit.

        For a scan, this is a list of all that may be found until its end.
        """
        expected, calls = self.expected, []
        ends = [[expected.found()]]
        if expected.state is not None:
            calls.append(("resume", jax.tree.map(np.asarray, expected.state)))
        for name, count in operations:
            first = self.new(count if name in ("extend", "scan") else 1)
            some = self.numbered(range(first, self.next))
            if name == "extend":
                calls.append((name, self.block(some)))
                expected.take(some)
            elif name == "append":
                calls.append((name, draws.sample(some[0])))
                expected.take(some)
            elif name == "scan":
                options = {"commit_every": count // 2, "block": 3}
                if count % 2:
                    options["commit_every_seconds"] = 0.0
                calls.append((name, first, count, options))
                ends.append([])
                for draw in some:
                    expected.take([draw])
                    state = draws.begin_scan(first := first + 1, self.chains)
                    expected.commit(state, 1)
                    ends[-1].append(expected.found())
            elif name == "read" and expected.committed is not None:
                calls.append((name, self.block(expected.committed)))
            elif name.startswith("commit"):
                state = {"n": self.next} if name == "commit a state" else None
                calls.append(("commit", state))
                expected.commit(state)
                ends.append([expected.found()])
        calls.append(("close",))
        expected.close()
        ends.append([expected.found()])
        return calls, ends

    def go_on_from(self, possible: list[Found]) -> None:
        """Go on from one of these, which others have left."""
        recording = Recording(self.path, LIKE, chains=self.chains, chunk_bytes=48)
        committed, state = recording.committed, None
        if committed is not None and recording._log.record.state is not None:
            path = recording.state_path
            state = eqx_ckpt.tree_deserialise_leaves(path, eqx_ckpt.tree_like(path))
        recording._log.abandon()
        self.expected = Expected()
        (found,) = {
            str(one): one
            for one in possible
            if committed == (None if one.committed is None else len(one.committed))
            and str(jax.tree.map(np.asarray, (state,)))
            == str(jax.tree.map(np.asarray, (one.state,)))
        }.values()
        self.expected.committed, self.expected.state, self.expected.steps = found
        self.open(None)

    @rule(operations=OPERATIONS, nth=st.integers(1, 150))
    def go_on_and_be_killed(self, operations, nth):
        self.leave()
        calls, ends = self.planned(operations)
        log = pathlib.Path(self.directory, "log")
        log.write_text("")
        outcome = self.zygote.run(
            *(processes.perform, self.path, self.chains, calls, str(log)),
            fault=Fault(self.path, nth),
        )
        assert outcome.signal or outcome.value == [""] * len(calls), outcome
        done = log.stat().st_size
        # Nothing that was committed is lost; what was being committed may be there.
        self.go_on_from([ends[done][-1], *(ends[done + 1 :] or [[]])[0]])
        if outcome.signal:
            self.ends["killed"] += 1

    @rule(operations=OPERATIONS)
    def go_on_in_two_processes(self, operations):
        self.leave()
        calls, ends = self.planned(operations)
        args = processes.perform, self.path, self.chains, calls
        assert self.zygote.call(jobs.values, 2, 2, *args) == 2 * [[""] * len(calls)]
        self.go_on_from(ends[-1])
        self.ends["two"] += 1

    @rule(count=counts)
    def lose_one_of_two_processes(self, count):
        self.leave()
        found = self.expected.found()
        calls, _ = self.planned([("extend", count)])
        calls[-1:] = [("die",), ("commit", {"n": self.next})]
        args = processes.perform, self.path, self.chains, calls, "", 1.0
        first, second = self.zygote.call(jobs.run, 2, 2, *args)
        assert second.signal == signal.SIGKILL or second.error
        assert first.error or first.value[-1]
        self.go_on_from([found])


@pytest.mark.slow
def test_any_sequence_of_several_processes(zygote):
    ends = collections.Counter()
    # What a seed draws depends on the modules that other tests have imported.
    for seed in range(5, 15):
        run(type("Of", (Shared,), {"zygote": zygote, "ends": ends}), seed, 8)
        if ends.keys() == {"killed", "two"}:
            return
    raise AssertionError(ends)
