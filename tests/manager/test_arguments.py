"""What is wrong with the arguments of a manager is said where they are given."""

import math
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager


PROGRAM = """
import sys
import eqx_ckpt as ck

sys.modules["tqdm"] = None
WRONG = {
    "keep": [3, [], "ab", {3: 4}],
    "when": [3, "ab", [10]],
    "layout": ["zar", None, 2, ["zarr"]],
    "compression": ["gzip", 3, True, ["zstd"]],
    "staging_bytes": [0, -1, "5", True, float("nan")],
    "progress": [True, "yes", 3],
    "timeout": [0, -1, "5", None, True, float("inf"), float("nan"), 1e300],
}
for argument, values in WRONG.items():
    for value in values:
        try:
            ck.CheckpointManager(sys.argv[1], **{argument: value})
        except (TypeError, ValueError, ImportError) as e:
            assert f"`{argument}` is {value!r}" in str(e) or "tqdm" in str(e), e
        else:
            raise AssertionError((argument, value))
for timeout in WRONG["timeout"]:
    saves = ck.tree_serialise_leaves, ck.tree_serialise_leaves_async
    for verb in (*saves, ck.tree_deserialise_leaves):
        try:
            verb(sys.argv[1], {"w": 1.0}, timeout=timeout)
        except (TypeError, ValueError, ImportError) as e:
            assert f"`timeout` is {timeout!r}" in str(e), e
        else:
            raise AssertionError(timeout)
"""


def test_wrong_arguments(tmp_path):
    """In a process of its own, in which nobody else looks at types."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "run")]
    subprocess.run(command, check=True, timeout=300)
    assert not (tmp_path / "run").exists()


def test_right_arguments(tmp_path):
    CheckpointManager(tmp_path, staging_bytes=1, timeout=0.5, layout="ocdbt")
    CheckpointManager(tmp_path, compression=lambda name, record: None)
    CheckpointManager(tmp_path, keep=(eqx_ckpt.keep_last(1), list))


# Python does not write an integer of more than 4300 digits, in the name of a test too.
LONG = [pytest.param(sign * 10**5000, id=f"{sign}0...") for sign in (1, -1)]


@pytest.mark.parametrize(
    "step", [True, -1, 1.0, "1", None, 2**63, 10**300, np.True_, *LONG]
)
@pytest.mark.parametrize("method", ["save", "restore", "delete", "read_manifest"])
def test_what_is_no_step(tmp_path, method, step):
    manager = CheckpointManager(tmp_path)
    args = {"save": (step, 1.0), "restore": (1.0, step)}.get(method, (step,))
    if method == "restore" and step is None:
        return
    with pytest.raises(Exception, match="is not a step|parameter step=") as raised:
        getattr(manager, method)(*args)
    assert len(str(raised.value)) < 200 or "parameter step=" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_step_of_too_many_digits_cannot_be_saved(tmp_path):
    with (
        CheckpointManager(tmp_path) as manager,
        pytest.raises(ValueError, match="this `int` is not a step"),
    ):
        manager.should_save(10**5000)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda steps: [f"{step:06d}" for step in steps],
        lambda steps: np.array(list(steps)) > 1,
        lambda steps: [step > 1 for step in steps],
        lambda steps: {str(step): 1 for step in steps},
        lambda steps: "123",
        lambda steps: [float(step) for step in steps],
        lambda steps: [-1],
        lambda steps: 3,
        lambda steps: None,
    ],
)
def test_a_keep_that_returns_something_else(tmp_path, wrong):
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": 1.0})
    manager = CheckpointManager(tmp_path, keep=[eqx_ckpt.keep_last(1), wrong])
    with pytest.raises(eqx_ckpt.CheckpointError, match="`keep` returned") as raised:
        manager.save(4, {"w": 1.0}).result()
    assert "has to return steps" in str(raised.value)
    assert manager.steps() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "right",
    [
        lambda steps: np.array(list(steps))[[0]],
        lambda steps: {1: None, 50: None},
        lambda steps: range(1, 2),
        lambda steps: (step for step in steps if step == 1),
        lambda steps: [jnp.int32(1)],
    ],
)
def test_a_keep_that_returns_integers(tmp_path, right):
    with CheckpointManager(tmp_path, keep=right) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": math.pi})
    assert manager.steps() == [1, 3]
