"""Which steps are kept: functions from steps to steps, and what the manager does."""

import math

import jax.numpy as jnp
import pytest

import eqx_ckpt
from eqx_ckpt import keep_best, keep_every, keep_last
from helpers import files_below


NAN = math.nan


def losses(**values):
    return {int(step[1:]): {"loss": loss} for step, loss in values.items()}


def test_keep_last():
    assert keep_last(2)({300: None, 100: None, 200: None}) == [200, 300]
    assert keep_last(5)({100: None}) == [100]


def test_keep_every():
    assert keep_every(200)(dict.fromkeys([0, 100, 200, 300, 400])) == [0, 200, 400]


def test_keep_best():
    steps = losses(s1=0.3, s2=0.1, s3=0.2)
    assert keep_best("loss", 1)(steps) == [2]
    assert keep_best("loss", 2)(steps) == [2, 3]
    assert keep_best("loss", 1, mode="max")(steps) == [1]
    assert keep_best("loss", 9)(steps) == [1, 2, 3]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_never_best(mode):
    steps = losses(s1=NAN, s2=0.1, s3=NAN)
    assert keep_best("loss", 1, mode)(steps) == [2]
    assert keep_best("loss", 3, mode)(steps) == [2]
    assert keep_best("loss", 1, mode)(losses(s1=NAN)) == []


def test_infinities_and_integers_are_numbers():
    steps = losses(s1=math.inf, s2=3, s3=-math.inf)
    assert keep_best("loss", 2)(steps) == [2, 3]
    assert keep_best("loss", 2, mode="max")(steps) == [1, 2]


def test_of_equals_the_newest_is_best():
    assert keep_best("loss", 1)(losses(s1=0.1, s2=0.1)) == [2]


def test_steps_without_the_metric_are_not_the_best():
    steps = {1: None, 2: {"loss": 0.1}, 3: {"loss": "low"}, 4: {"loss": True}, 5: [1]}
    assert keep_best("loss", 5)(steps) == [2]


def test_a_nested_number_is_a_metric(tmp_path, caplog):
    """It has the name that `metrics` and the report give it, wherever one is chosen."""
    keep = keep_best("eval/loss", 2)
    with eqx_ckpt.CheckpointManager(tmp_path / "run", keep=keep) as manager:
        for step, loss in enumerate((0.3, 0.1, 0.2, NAN)):
            manager.save(step, {"w": 1.0}, metadata={"eval": {"loss": loss}})
        assert manager.best("eval/loss") == 1
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="are 'eval/loss'"):
            manager.best("loss")
    assert manager.steps() == [1, 2, 3]
    assert eqx_ckpt.inspect.metrics(tmp_path / "run")[1] == {"eval/loss": 0.1}
    for where in (tmp_path, tmp_path / "run"):
        best = eqx_ckpt.inspect.best_step(where, "eval/loss", "max")
        assert best == str(tmp_path / "run/000002")
    assert not caplog.records


def test_a_metric_that_no_step_has_removes_nothing(caplog):
    assert keep_best("los", 1)(losses(s1=0.1, s2=0.2)) == [1, 2]
    assert "'los'" in caplog.text


@pytest.mark.parametrize("keep", [keep_last, keep_every, lambda n: keep_best("x", n)])
@pytest.mark.parametrize("n", [0, -1])
def test_numbers_that_are_no_counts(keep, n):
    with pytest.raises(ValueError, match=f"`n` is {n}"):
        keep(n)


def test_a_mode_that_is_none():
    with pytest.raises(Exception, match="mode"):
        keep_best("loss", 1, mode="least")


def saved(run, keep, steps, metadata=None):
    with eqx_ckpt.CheckpointManager(run, keep=keep) as manager:
        for step in steps:
            of_step = None if metadata is None else metadata[step]
            manager.save(step, {"w": jnp.ones(3), "step": step}, metadata=of_step)
    return manager.steps()


def test_the_default_keeps_all(tmp_path):
    assert saved(tmp_path, None, range(4)) == [0, 1, 2, 3]


def test_several_are_united(tmp_path):
    keep = [keep_last(2), keep_every(4), keep_best("loss", 1)]
    metadata = losses(s0=5.0, s1=0.1, s2=3, s3=2, s4=1, s5=4, s6=4, s7=4, s8=4, s9=4)
    assert saved(tmp_path, keep, range(10), metadata) == [0, 1, 4, 8, 9]


def test_removed_steps_leave_nothing(tmp_path):
    assert saved(tmp_path, keep_last(1), range(3)) == [2]
    assert {path.split("/")[0] for path in files_below(tmp_path)} == {"000002"}
    assert [p.name for p in tmp_path.iterdir()] == ["000002"]


def test_the_newest_and_the_one_just_saved_are_never_removed(tmp_path):
    saved(tmp_path, None, [5, 9])
    assert saved(tmp_path, lambda steps: [], [7]) == [7, 9]


def test_a_step_that_is_saved_again_is_not_removed_before(tmp_path):
    saved(tmp_path, None, [1, 2])
    manager = eqx_ckpt.CheckpointManager(tmp_path, keep=keep_last(1))
    for _ in range(2):
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match="exists"):
            manager.save(1, {"w": 5.0})
        assert manager.steps() == [1, 2]


def test_the_last_step_of_a_training_stays_until_the_next_is_saved(tmp_path):
    saved(tmp_path, None, [1, 9])
    manager = eqx_ckpt.CheckpointManager(tmp_path, keep=keep_last(1))
    manager.save(5, {"w": 5.0}).result()
    for _ in range(2):
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match="exists"):
            manager.save(9, {"w": 9.0})
        assert manager.steps() == [5, 9]
    manager.save(6, {"w": 6.0}).result()
    assert manager.steps() == [6, 9]


def test_a_step_whose_metric_cannot_be_read_stays(tmp_path, caplog):
    keep = keep_best("loss", 1)
    saved(tmp_path, None, [1, 2], losses(s1=0.2, s2=0.1))
    (tmp_path / "000001/zarr.json").write_bytes(b"")
    assert saved(tmp_path, keep, [3], losses(s3=0.3)) == [1, 2, 3]
    assert "The metadata of step 1 cannot be read" in caplog.text


def test_a_keep_of_the_user_that_fails_is_heard(tmp_path):
    def fail(steps):
        raise ZeroDivisionError("no steps")

    manager = eqx_ckpt.CheckpointManager(tmp_path, keep=fail)
    with pytest.raises(ZeroDivisionError) as raised:
        manager.save(1, {"w": 1}).result()
    assert "Step 1 was saved." in raised.value.__notes__[0]
    assert manager.steps() == [1]


@pytest.mark.parametrize("keep", [[], [list, None]])
def test_what_is_no_keep(tmp_path, keep):
    with pytest.raises(Exception, match="keep"):
        eqx_ckpt.CheckpointManager(tmp_path, keep=keep)


def test_a_keep_may_change_the_metadata_that_it_gets(tmp_path):
    """Neither another function nor the next save sees that."""

    def clear(steps):
        for metadata in steps.values():
            metadata["notes"].append("seen")
            metadata["loss"] = 9.0
        return []

    metadata = losses(s1=0.1, s2=0.3, s3=0.2, s4=0.4)
    for of_step in metadata.values():
        of_step["notes"] = []
    keep = [clear, keep_best("loss", 2)]
    assert saved(tmp_path, keep, [1, 2, 3, 4], metadata) == [1, 3, 4]
    manager = eqx_ckpt.CheckpointManager(tmp_path)
    assert [manager.read_manifest(s).metadata for s in (1, 3)] == [
        {"loss": 0.1, "notes": []},
        {"loss": 0.2, "notes": []},
    ]


def test_a_keep_that_returns_no_steps(tmp_path):
    manager = eqx_ckpt.CheckpointManager(tmp_path, keep=lambda steps: None)
    with pytest.raises(eqx_ckpt.CheckpointError, match="`keep` returned None"):
        manager.save(1, {"w": 1}).result()


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        [1, {"a": NAN, "b": math.inf}],
        'x\n"metadata": 1,\n"unsaved": {"y": 2}\x00\u2028é',
        {'\n"metadata": ': ',\n"unsaved": ', "deep": [[[{"a": {}}]]]},
    ],
)
def test_a_keep_gets_the_metadata_as_they_were_saved(tmp_path, metadata):
    seen = []

    def keep(steps):
        seen.append(steps[1])
        return steps

    saved(tmp_path, keep, [1], {1: metadata})
    assert repr(seen) == repr([metadata])
