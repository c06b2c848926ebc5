"""Random sequences of calls, beside a model of what a run and its manager are."""

import contextlib
import random
import signal
import threading
import uuid

import numpy as np
import pytest

from eqx_ckpt import (
    CheckpointError,
    CheckpointManager,
    keep_best,
    keep_last,
    save_every_steps,
)


EVERY = 4
CALLS = "save fail hold delete ask ask told reopen".split()


def spoil(steps):
    """A `keep` that changes all that it is given, and keeps nothing."""
    for metadata in steps.values():
        metadata["notes"].clear()
        metadata.update(loss=0.0)
    return []


class Held:
    """A `progress` that lets a save go on when it may."""

    def __init__(self):
        self.may = threading.Event()
        self.may.set()

    def __call__(self, phase, *_):
        assert self.may.wait(60)


class Model:
    """What a run has, and what the manager has to say of it."""

    def __init__(self):
        self.losses = {}
        self.running = None
        self.told = False

    def there(self):
        return {*self.losses} | ({self.running[0]} if self.running else set())

    def settle(self):
        """The running save ends; afterwards, old steps are removed."""
        if self.running is None:
            return False
        (step, loss), self.running = self.running, None
        if loss is None:
            return True
        self.losses[step] = loss
        best = min(self.losses, key=lambda s: (self.losses[s], -s))
        kept = {*sorted(self.losses)[-2:], best, step}
        self.losses = {s: x for s, x in self.losses.items() if s in kept}
        return False

    def last(self):
        return max(self.there(), default=None)

    def should_save(self, step):
        due = step // EVERY > (self.last() or 0) // EVERY
        return (due or self.told) and step not in self.there()


class Pair:
    """A manager and the model beside it, given the same calls."""

    def __init__(self, run):
        self.run, self.model, self.held, self.lasts = run, Model(), Held(), []
        self.open()

    def open(self):
        def note(step, last):
            self.lasts.append(last)
            return False

        self.manager = CheckpointManager(
            self.run,
            keep=[spoil, keep_last(2), keep_best("loss", 1)],
            when=[save_every_steps(EVERY), note],
            progress=self.held,
            check_finite=True,
        )

    def settle(self):
        """Let the running save end; its failure is raised by the next call."""
        self.held.may.set()
        failed = self.model.settle()
        raised = pytest.raises(CheckpointError, match="NaN")
        with raised if failed else contextlib.nullcontext():
            self.manager.wait()

    def save(self, step, loss, *, fails=False, is_held=False):
        self.settle()
        tree = {"w": np.full(3, np.nan if fails else 1.0)}
        if step in self.model.losses:
            with pytest.raises(CheckpointError, match="exists"):
                self.manager.save(step, tree)
            return
        if is_held:
            self.held.may.clear()
        metadata = {"loss": loss, "notes": ["as it was saved"]}
        self.manager.save(step, tree, metadata=metadata)
        self.model.running = step, None if fails else loss

    def call(self, what, step, loss):
        if what == "save":
            self.save(step, loss)
        elif what == "fail":
            self.save(step, loss, fails=True)
        elif what == "hold":
            self.save(step, loss, fails=loss > 0.5, is_held=True)
        elif what == "delete":
            self.settle()
            for newest in sorted(self.model.losses)[-1:]:
                self.manager.delete(newest)
                del self.model.losses[newest]
        elif what == "told":
            self.manager.should_save(step)
            signal.raise_signal(signal.SIGTERM)
            self.model.told = True
        elif what == "reopen":
            self.settle()
            self.manager.close()
            self.model.told = False
            self.open()

    def check(self, step):
        if self.held.may.is_set():
            self.settle()
            assert self.manager.steps() == sorted(self.model.losses)
            for there, loss in self.model.losses.items():
                found = self.manager.read_manifest(there).metadata
                assert found == {"loss": loss, "notes": ["as it was saved"]}
        for asked in {step, *self.model.there()}:
            assert self.manager.should_save(asked) == self.model.should_save(asked)
            assert self.model.told or self.lasts[-1] == self.model.last()
        assert self.manager.reached_preemption == self.model.told


@pytest.mark.parametrize("storage", ["disk", "memory"])
@pytest.mark.parametrize("seed", range(6))
def test_random_sequences(tmp_path, seed, storage):
    random_ = random.Random(seed)
    run = tmp_path if storage == "disk" else f"memory://{uuid.uuid4().hex}/run"
    pair, step = Pair(run), 0
    for _ in range(25):
        step += random_.choice([0, 1, 1, 1, 2, 5])
        pair.call(random_.choice(CALLS), step, random_.random())
        pair.check(step + random_.choice([0, 0, 1, 3]))
    pair.settle()
    pair.manager.close()
