"""What commands show of the configs of runs."""

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager

from .test_json import check


pytest.importorskip("typer")


def given(lr, **others):
    return {"optim": {"lr": lr, "name": "adam"}, "seed": 0} | others


@pytest.fixture
def folder(tmp_path):
    """Two runs; the first one has another config from step 2 on."""
    for run, step, config in (
        ("a", 1, given(0.1)),
        ("a", 2, given(0.2, clip=[1, 2], note="\x1b[31m", a=1, b=2)),
        ("b", 1, given(0.1)),
        ("c", 1, None),
    ):
        with CheckpointManager(tmp_path / run, config=config) as manager:
            if manager.latest():
                manager.restore({"w": 0})
            manager.save(step, {"w": 1})
    return tmp_path


def test_ls_of_a_folder(folder, ask, data):
    _, text = ask("ls", folder)
    head, *rows = [line.split() for line in text.splitlines()]
    names = ["a", "b", "clip", "note", "optim/lr", "optim/name", "seed"]
    assert head == ["run", "newest", "age", "size", "steps", *names]
    assert [row[-8:] for row in rows] == [
        ["1", "2", "[1,", "2]", '"\\u001b[31m"', "0.2", '"adam"', "0"],
        ["1", "-", "-", "-", "-", "0.1", '"adam"', "0"],
        ["1", *"-------"],
    ]
    status, found = data("ls", folder)
    check("ls", found)
    assert status == 0
    assert [run["config"] for run in found["runs"]] == [
        given(0.2, clip=[1, 2], note="\x1b[31m", a=1, b=2),
        given(0.1),
        None,
    ]
    check("log", data("log", folder)[1])


def test_equal_configs_have_no_column(tmp_path, ask):
    for run in ("a", "b"):
        with CheckpointManager(tmp_path / run, config=given(0.1)) as manager:
            manager.save(1, {"w": 1})
    assert ask("ls", tmp_path)[1].splitlines()[0].split()[-1] == "steps"


def test_many_that_differ(tmp_path, ask):
    for run in range(2):
        config = {f"k{i:02}": run for i in range(20)}
        with CheckpointManager(tmp_path / str(run), config=config) as manager:
            manager.save(1, {"w": 1})
    assert ask("ls", tmp_path)[1].splitlines()[0].split()[-1] == "k07"


def test_ls_of_a_run(folder, ask, data):
    _, text = ask("ls", folder / "a")
    assert text.splitlines()[-1].endswith(
        "[latest, optim/lr: 0.1 → 0.2, a: - → 1, b: - → 2, ...]"
    )
    status, found = data("ls", folder / "a")
    check("ls", found)
    assert status == 0
    first, second = [step["config_changes"] for step in found["steps"]]
    assert first == {}
    assert second["optim/lr"] == ["0.1", "0.2"]
    assert second["a"] == ["-", "1"]
    assert data("ls", folder / "c")[1]["steps"][0]["config_changes"] is None


def test_diff(folder, ask, data):
    """Configs that differ are shown, and the checkpoints are equal all the same."""
    status, text = ask("diff", folder / "a", folder / "b")
    assert status == 0
    assert 'config note: "\\u001b[31m" → -\nconfig optim/lr: 0.2 → 0.1\n' in text
    status, found = data("diff", folder / "a/000001", folder / "b")
    check("diff", found)
    assert (status, found["config"]) == (0, {})
    np.savez(folder / "a.npz", w=np.ones(3))
    _, found = data("diff", folder / "a", folder / "a.npz")
    assert found["config"]["optim/lr"] == ["0.2", "-"]


def test_report(folder, tmp_path):
    pytest.importorskip("plotly")
    page = tmp_path / "page.html"
    assert eqx_ckpt.inspect.write_report(folder / "a", page) == []
    text = page.read_text()
    assert '"config":{"optim":{"lr":0.1' in text
    assert '"notes":["optim/lr: 0.1 \\u2192 0.2"' in text
    eqx_ckpt.inspect.write_report(folder / "b/000001", page, overwrite=True)
    assert '"config":{"optim":{"lr":0.1' in page.read_text()
    for config in folder.glob("a/config.*"):
        config.write_text("{}")
    alerts = eqx_ckpt.inspect.write_report(folder / "a", page, overwrite=True)
    assert len(alerts) == 2
    assert all("is damaged" in alert for alert in alerts)


@pytest.mark.parametrize("harm", ["damage", "loss"])
def test_what_copies_a_run_without_its_config(tmp_path, ask, harm):
    """Its steps are there, and the status is that of damage."""
    with CheckpointManager(tmp_path / "run", config=given(0.1)) as manager:
        for step in (1, 2):
            manager.save(step, {"w": step})
    (config,) = (tmp_path / "run").glob("config.*")
    if harm == "damage":
        config.write_text("{}")
    else:
        config.unlink()
    for command in (["sync"], ["fork", "--step", "1"]):
        new = tmp_path / command[0]
        status, text = ask(command[0], tmp_path / "run", new, *command[1:])
        assert status == ask("ls", tmp_path / "run")[0] == 1
        assert "config" in text
        assert CheckpointManager(new).restore({"w": 0}, 1) == {"w": 1}
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="without its config"):
        eqx_ckpt.sync(tmp_path / "run", tmp_path / "third")
    assert CheckpointManager(tmp_path / "third").steps() == [1, 2]


def test_values_without_a_name(tmp_path, ask):
    for run, lr in (("a", 1), ("b", 2)):
        with CheckpointManager(tmp_path / run, config={"": {"lr": lr}}) as manager:
            manager.save(1, {"w": 1})
    assert ask("ls", tmp_path)[1].splitlines()[0].split()[-1] == "/lr"


def test_long_values_leave_room(tmp_path, ask):
    for run in ("a", "b"):
        config = {"data": "/somewhere/" + "far/" * 40 + run, "lr": 1}
        with CheckpointManager(tmp_path / run, config=config) as manager:
            manager.save(1, {"w": 1}, metadata={"loss": 1})
    _, *rows = ask("ls", tmp_path)[1].splitlines()
    ends = ['far/a"', 'far/b"']
    assert all(end in row for end, row in zip(ends, rows, strict=True))


def test_a_step_goes_on_from_an_older_one(tmp_path, data):
    """Its config is compared with that of the step that it came from."""
    for step, before, lr in ((10, None, 1), (15, 10, 2), (20, 10, 1), (30, 15, 2)):
        with CheckpointManager(tmp_path, config=given(lr)) as manager:
            if before:
                manager.restore({"w": 0}, before)
            manager.save(step, {"w": 1})
    steps = data("ls", tmp_path)[1]["steps"]
    changed = {step["step"]: step["config_changes"] for step in steps}
    assert changed == {10: {}, 15: {"optim/lr": ["1", "2"]}, 20: {}, 30: {}}
