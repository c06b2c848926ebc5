"""The command line: what it prints, and with which status it ends."""

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from helpers import besides_metrics
from support import run_commands

from .conftest import dead_save, state


pytest.importorskip("typer")
pytestmark = pytest.mark.oldest

DOCS = Path(__file__).parents[2] / "docs/usage/commandline.md"


def damage(run, step, name="model/w/c.0.0"):
    (run / f"{step:06d}" / name).write_bytes(b"\1" * 28)


def test_ls(run, ask, data):
    status, text = ask("ls", run, "--best", "loss")
    assert status == 0
    _, first, second, third = text.splitlines()
    assert first.split()[0] == "1"
    assert "[best]" in second
    assert "loss=0.5" in second
    assert "[latest]" in third
    assert "\x1b" not in text
    status, found = data("ls", run)
    assert [entry["step"] for entry in found["steps"]] == [1, 2, 3]
    assert [entry["latest"] for entry in found["steps"]] == [False, False, True]
    assert found["steps"][0]["metadata"]["loss"] == 1.5
    assert found["steps"][0]["nbytes"] == 4 * 9 + 8


def test_ls_marks_no_copy_as_the_best(run, data):
    shutil.copytree(run / "000002", run / "2")
    status, found = data("ls", run, "--best", "loss")
    assert status == 1
    best = [entry["path"] for entry in found["steps"] if entry["best"]]
    assert best == [str(run / "000002")]


def test_ls_of_what_each_step_has_for_itself(tmp_path, ask, data):
    tree = {"base": np.arange(1000.0), "n": np.zeros(3)}
    with eqx_ckpt.CheckpointManager(tmp_path, incremental=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, {**tree, "n": tree["n"] + step})
    (tmp_path / "000003/zarr.json").write_bytes(b"damaged")
    head = ask("ls", tmp_path, "--own")[1].splitlines()[0]
    assert head.split() == ["step", "age", "size", "own", "leaves"]
    own = eqx_ckpt.inspect.own_bytes(tmp_path)
    found = data("ls", tmp_path, "--own")[1]["steps"]
    assert [entry["own_nbytes"] for entry in found] == [own[1], own[2], None]
    assert 0 < own[1] < 4000
    found = data("ls", tmp_path)[1]["steps"]
    assert [entry["own_nbytes"] for entry in found] == [None] * 3


def test_a_metric_that_no_step_has(run, ask, capsys):
    for options in ([], ["--json"]):
        status, text = ask("ls", run, "--best", "typo", *options)
        assert status == 2
        assert text.startswith("eqx-ckpt: None of the 3 steps in ")
        assert "The numbers there are 'loss'." in text


def test_a_metric_without_a_name(tmp_path, ask, data):
    """It is one as any other, and nested ones are not taken for one of above."""
    run = tmp_path / "run"
    with eqx_ckpt.CheckpointManager(run, keep=eqx_ckpt.keep_best("", 1)) as manager:
        for step, value in ((1, 2.0), (2, 1.0), (3, 3.0)):
            metadata = {"": value, "a": 5.0, "b": {"": {"a": value}}}
            manager.save(step, {"w": np.ones(1)}, metadata=metadata)
    expected = {"": 1.0, "a": 5.0, "b//a": 1.0}
    assert eqx_ckpt.inspect.metrics(run)[2] == expected
    assert eqx_ckpt.inspect.metrics(run)[1] == expected | {"": 2.0, "b//a": 2.0}
    assert manager.best("") == 2
    for where in (run, tmp_path):
        found = data("ls", where, "--best", "")[1]
        assert (found.get("steps") or found["runs"])[0]["best"]
        assert ask("ls", where, "--best", "")[0] == 0
    with eqx_ckpt.CheckpointManager(run) as manager:
        manager.save(4, {"w": np.ones(1)}, metadata={"": {"a": 1.0}})
    assert eqx_ckpt.inspect.metrics(run)[4] == {"/a": 1.0}


def test_a_metric_that_is_nan_in_all_steps(tmp_path, ask):
    with eqx_ckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.ones(1)}, metadata={"loss": float("nan")})
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="other than NaN"):
            manager.best("loss")
    assert (
        "'loss' in its metadata, other than NaN"
        in ask("ls", tmp_path, "--best", "loss")[1]
    )


def test_a_damaged_manifest_is_listed(run, ask, data):
    manifest = run / "000002/zarr.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"model", b"modem"))
    status, text = ask("ls", run)
    assert status == 1
    assert "is damaged" in text
    status, listed = data("ls", run)
    assert status == 1
    problems = [entry["problem"] for entry in listed["steps"]]
    assert [problem is None for problem in problems] == [True, False, True]


def test_tree(run, ask, data):
    status, text = ask("tree", run / "000001")
    assert status == 0
    assert "model  36 B  9 numbers in 2 leaves" in text
    assert "│   └── w  float32[2, 3]  24 B" in text
    assert "step  Python int = 1" in text
    shallow = ask("tree", run / "000001", "--depth", 1)[1]
    assert "model" in shallow
    assert "float32" not in shallow
    _, found = data("tree", run / "000001", "model")
    assert [leaf["name"] for leaf in found["leaves"]] == ["model/b", "model/w"]
    assert found["leaves"][1]["shape"] == [2, 3]
    assert found["nbytes"] == 36


def test_tree_since_another_step(tmp_path, ask, data):
    model = {"frozen": {"a": jnp.ones(3), "b": np.zeros(2)}, "w": jnp.ones(2), "n": 1}
    changed = {**model, "w": jnp.zeros(2)}
    trees = [model, changed, {**changed, "n": 1.0, "frozen": {"a": jnp.ones((3, 1))}}]
    for place in (tmp_path / "run", "memory://since/run"):
        with eqx_ckpt.CheckpointManager(place, incremental=True) as manager:
            for step, tree in enumerate(trees):
                manager.save(step, tree)
        first, second, third = (f"{place}/00000{step}" for step in range(3))
        status, text = ask("tree", second, "--since", first)
        assert status == 0
        assert [line for line in text.splitlines() if "unchanged" not in line] == [
            f"{second}  36 B  8 numbers in 4 leaves",
            "└── w  float32[2]  8 B",
        ]
        _, found = data("tree", second, "--since", first)
        assert found["since"] == first
        same = eqx_ckpt.inspect.same_leaves(second, first)
        assert same == {"frozen/a", "frozen/b", "n"}
        assert same == {leaf["name"] for leaf in found["leaves"] if leaf["same"]}
        assert eqx_ckpt.inspect.same_leaves(third, second) == {"w"}
        assert data("tree", second)[1]["leaves"][0]["same"] is None
    # What is compressed otherwise is equal, and what is cut otherwise is not.
    eqx_ckpt.copy(second, tmp_path / "packed", compression="zstd")
    assert eqx_ckpt.inspect.same_leaves(tmp_path / "packed", first) == same


def test_what_was_left_out(tmp_path, ask, data):
    """What is not saved, or cannot be read, is listed with the reason."""
    tree = {"w": jnp.ones(2), "inside": {"name": "a\x1b[31m"}}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    status, text = ask("tree", tmp_path / "c")
    assert status == 0
    assert "└── inside  0 B  0 numbers in 0 leaves" in text
    assert "└── name  left out: 'a\\x1b[31m'" in text
    np.savez(tmp_path / "x.npz", w=np.ones(2), b=np.ones(2, jnp.bfloat16))
    path = tmp_path / "x.npz"
    reason = "an array that has the dtype `|V2`, which cannot be stored exactly"
    assert f"└── b  left out: {reason}\n" in ask("tree", path)[1]
    assert data("tree", path)[1]["unsaved"] == {"b": reason}
    assert data("tree", path, "w")[1]["unsaved"] == {}
    assert ask("show", path, "b") == (2, f"eqx-ckpt: 'b' was left out: {reason}.\n")


def test_tree_says_how_leaves_were_sharded(tmp_path, ask):
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.P("x", None))
    tree = {"w": jax.device_put(jnp.zeros((4, 4)), sharding)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    assert "sharded (x, -) on (x=2, y=4)" in ask("tree", tmp_path / "c")[1]


def test_show(run, ask, data):
    status, text = ask("show", run / "000001", "model/w[1, :2]")
    assert status == 0
    assert "[4. 5.]" in text
    assert re.search(r"max  5$", text, re.M)
    *_, bin, end = text.splitlines()
    assert end.split() == ["5"]
    assert bin.split() == ["4.9", "1", "█" * 56]
    _, found = data("show", run / "000001", "model/w[0]")
    assert found["values"] == [1, 2, 3]
    assert sum(found["histogram"]["counts"]) == 3
    assert found["stats"]["max"] == 3
    assert ask("show", run / "000001", "key")[0] == 0
    assert data("show", run / "000001", "step")[1]["values"] == 1


INDICES = ["0", "-1", "1:", "::-2", ":0", "2:1", "-3:", "1:100:2", ":, 1", "0, ::-1"]


@pytest.mark.parametrize("index", [*INDICES, "1, 2", "-1, :2", ":, 5:"])
def test_the_statistics_of_a_part(tmp_path, data, index):
    """They are of the values that are shown, which are NumPy's."""
    tree = {
        "w": np.arange(12.0).reshape(4, 3),
        "big": np.arange(12, dtype=">i4").reshape(4, 3) - 6,
        "dates": np.arange(12).reshape(4, 3).astype("M8[D]"),
        "key": jax.random.split(jax.random.key(0), (4, 3)),
    }
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    for name, leaf in tree.items():
        host = np.asarray(jax.random.key_data(leaf) if name == "key" else leaf)
        part = eval(f"host[{index}]", {"host": host})
        status, found = data("show", tmp_path / "c", f"{name}[{index}]")
        assert status == 0
        assert (
            found["values"] == (part.astype(str) if name == "dates" else part).tolist()
        )
        assert found["stats"]["count"] == part.size // (2 if name == "key" else 1)
        if part.size and name in ("w", "big"):
            stats = found["stats"]
            assert (stats["min"], stats["max"]) == (part.min(), part.max())
            assert stats["mean"] == pytest.approx(part.mean())


def test_only_a_part_is_read(tmp_path, ask):
    """What is damaged elsewhere does not matter."""
    w = np.zeros((4, 2**21), np.float32)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"w": w})
    *_, last = sorted((tmp_path / "c/w").glob("c.*"))
    last.write_bytes(b"")
    assert ask("show", tmp_path / "c", "w[0, :3]")[0] == 0
    assert ask("show", tmp_path / "c", "w[-1, -3:]")[0] == 1


def test_show_of_what_json_has_not(tmp_path, data):
    dates = np.array(["2026-01-02", "NaT"], "M8[D]")
    tree = {"dates": dates, "big": 10**30, "c": np.array([1 + 2j]), "nan": np.nan}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    values = {name: data("show", tmp_path / "c", name)[1]["values"] for name in tree}
    assert values["dates"] == ["2026-01-02", "NaT"]
    assert values["big"] == 10**30
    assert values["c"] == [[1, 2]]
    assert values["nan"] == "nan"


@pytest.mark.parametrize(
    ("digits", "text"), [(400, str(10**400)), (5000, hex(10**5000))]
)
def test_integers_that_no_float_holds(tmp_path, ask, data, digits, text):
    """Those whose decimal digits Python would not read either are hexadecimal."""
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"n": 10**digits})
    for command in (["show", tmp_path / "c", "n"], ["stats", tmp_path / "c"]):
        status, shown = ask(*command)
        assert status == 0
        assert text in shown
    _, found = data("show", tmp_path / "c", "n")
    assert found["histogram"] == {"counts": [], "edges": []}
    assert str(found["values"]) == str(found["stats"]["max"]) == text
    assert str(data("stats", tmp_path / "c")[1]["leaves"][0]["min"]) == text


@pytest.mark.filterwarnings("default")
def test_warnings_are_shown_if_they_are_for_users(run, ask, monkeypatch):
    def digest(*_, **__):
        warnings.warn("for developers", DeprecationWarning, stacklevel=1)
        warnings.warn("for users", UserWarning, stacklevel=1)
        return "0"

    monkeypatch.setattr(eqx_ckpt.inspect, "digest", digest)
    status, text = ask("digest", run / "000001")
    assert status == 0
    assert "for users" in text
    assert "for developers" not in text


def test_a_histogram_of_the_smallest_numbers(tmp_path, ask, data):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", {"x": np.array([0, 5e-324])})
    assert ask("show", tmp_path / "c", "x")[0] == 0
    histogram = data("show", tmp_path / "c", "x")[1]["histogram"]
    assert histogram == {"counts": [2], "edges": [0, 5e-324]}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("model/w[5]", "out of bounds"),
        ("model/w[0,0,0]", "too many indices"),
        ("model/w[::]x", "no leaf"),
        ("model/w[1:2:3:4]", "is not an index"),
        ("model/w[0:2:0]", "is not an index"),
        ("model/W", "Did you mean 'model/w'"),
        ("model", "Did you mean 'model/b', 'model/w'"),
    ],
)
def test_leaves_and_parts_that_are_not_there(run, ask, name, problem):
    status, text = ask("show", run / "000001", name)
    assert status == 2
    assert problem in text


@pytest.mark.parametrize("text", ["q/é", "q/e\u0301", "Q/%C3%A9"])
def test_a_name_as_a_person_writes_it(tmp_path, ask, text):
    tree = {"q": {"é": np.ones(3), "w": np.ones(2), "e": np.ones(1)}}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    for line in (["show"], ["tree"], ["stats"]):
        said = ask(*line, tmp_path / "c", text)
        assert said[0] == 2
        assert "Did you mean 'q/%C3%A9'?" in said[1]


def test_stats(tmp_path, ask, data):
    tree = {"ok": np.ones(3), "bad": np.array([1, np.nan, -np.inf]), "x": np.ones(9)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", tree)
    status, text = ask("stats", tmp_path / "c")
    assert status == 1
    assert "NaN or infinity: bad" in text
    status, found = data("stats", tmp_path / "c", "ok")
    assert status == 0
    assert found["leaves"] == [
        {"name": "ok", "count": 3, "nan": 0, "inf": 0, "min": 1.0, "max": 1.0}
        | {"mean": 1.0, "std": 0.0, "norm": 3**0.5}
    ]
    status, text = ask("stats", tmp_path / "c", "--bad")
    assert status == 1
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == ["leaf", "bad", "NaN"]
    status, found = data("stats", tmp_path / "c", "--bad")
    assert [leaf["name"] for leaf in found["leaves"]] == ["bad"]
    assert ask("stats", tmp_path / "c", "ok", "--bad") == (0, "")
    (tmp_path / "c/x/c.0").unlink()
    status, found = data("stats", tmp_path / "c")
    assert status == 1
    assert list(found["damage"]) == ["x"]
    assert [leaf["name"] for leaf in found["leaves"]] == ["bad", "ok"]


def test_diff(run, tmp_path, ask, data):
    a, b = run / "000001", tmp_path / "b"
    eqx_ckpt.tree_serialise_leaves(b, state(1))
    assert ask("diff", a, b, "--values") == (0, "")
    tree = state(1) | {"more": jnp.zeros(2)}
    tree["model"] = {"w": tree["model"]["w"].at[1, 2].add(0.5), "b": jnp.ones(4)}
    eqx_ckpt.tree_serialise_leaves(b, tree, overwrite=True)
    status, text = ask("diff", a, b)
    assert status == 1
    assert "more: only in b: float32[2]" in text
    assert "model/b: different type: float32[3], float32[4]" in text
    assert "model/w" not in text
    assert text.endswith("2 of 5 leaves differ: 1 different type, 1 only in b.\n")
    status, text = ask("diff", a, b, "model/w", "--values")
    assert text.splitlines()[1:] == ["1 of 1 leaves differ: 1 different values."]
    status, found = data("diff", a, b, "--values")
    assert not found["same"]
    (of_w,) = [leaf for leaf in found["leaves"] if leaf["name"] == "model/w"]
    assert (of_w["count"], of_w["max_abs"], of_w["max_rel"]) == (1, 0.5, 0.5 / 6.5)


def test_distances_in_a_diff(tmp_path, ask, data):
    ours = {
        "nan": np.array([np.nan, 1.0, 1.0]),
        "one": np.array(2.0),
        "int": np.array([2**60, 5]),
        "far": np.array([-(2**63), 0]),
        "uint": np.array([2**64 - 1, 5], np.uint64),
        "flag": np.array([True, False]),
        "year": np.array(["2020", "NaT"], "M8[Y]"),
        "date": np.array(["2020-01-01", "NaT"], "M8[D]"),
    }
    other = {
        "nan": np.array([np.nan, np.nan, 100.0]),
        "one": np.array(4.0),
        "int": np.array([2**60 + 1, 5]),
        "far": np.array([2**63 - 1, 0]),
        "uint": np.array([2**64 - 3, 5], np.uint64),
        "flag": np.array([True, True]),
        "year": np.array(["2022", "NaT"], "M8[Y]"),
        "date": np.array(["2020-01-01", "2020-01-01"], "M8[D]"),
    }
    expected = {
        "nan": (2, "inf", "inf", "inf"),
        "one": (1, 2.0, 0.5, 1.0),
        "date": (1, "inf", None, None),
        "far": (1, 2.0**64, 2.0, 2.0),
        "flag": (1, 1.0, 1.0, 1.0),
        "int": (1, 1.0, 2.0**-60, 2.0**-60),
        "uint": (1, 2.0, 2.0**-63, 2.0**-63),
        "year": (1, 2.0, None, None),
    }
    a, b = tmp_path / "a", tmp_path / "b"
    eqx_ckpt.tree_serialise_leaves(a, ours)
    eqx_ckpt.tree_serialise_leaves(b, other)
    status, found = data("diff", a, b, "--values")
    assert status == 1
    apart = {
        leaf["name"]: (
            leaf["count"],
            leaf["max_abs"],
            leaf["max_rel"],
            leaf["norm_rel"],
        )
        for leaf in found["leaves"]
    }
    assert apart == expected
    assert [*apart] == [*expected]
    assert found["compared"] == 8
    text = ask("diff", a, b, "--values")[1]
    assert (
        "nan: different values: 2 differ, at most inf, relative inf, norm inf\n" in text
    )
    assert "year: different values: 1 differ, at most 2\n" in text


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_what_looks_like_a_step_is_named(run, ask, data, command):
    (run / "000003").rename(run / "3")
    (run / "000001/zarr.json").unlink()
    status, text = ask(command, run)
    assert status == 1
    assert "step 3 is named '000003'" in text
    assert "000001' is not a checkpoint: it has no `zarr.json`" in text
    found = data(command, run)[1]["steps" if command == "ls" else "checkpoints"]
    names = {entry["path"].split("/")[-1] for entry in found if entry["problem"]}
    assert names == {"000001", "3"}
    if command == "ls":
        assert [entry["step"] for entry in found if entry["latest"]] == [2]


def test_a_digest(run, ask, data):
    ckpt = run / "000001"
    status, text = ask("digest", ckpt)
    digest = text.strip()
    assert (status, digest) == (0, eqx_ckpt.inspect.digest(ckpt))
    assert data("digest", ckpt) == (0, {"path": str(ckpt), "digest": digest})
    assert ask("verify", ckpt, "--digest", digest) == (0, f"ok  {ckpt}\n")
    status, text = ask("verify", run / "000002", "--digest", digest)
    assert status == 1
    assert f"and {digest} was expected" in text
    status, found = data("verify", run / "000002", "--digest", digest)
    assert status == 1
    assert [one["ok"] for one in found["checkpoints"]] == [False]
    damage(run, 1)
    for command in (["digest", ckpt], ["verify", ckpt, "--digest", digest]):
        status, text = ask(*command)
        assert status == 1
        assert "'model/w'" in text


def test_verify(run, ask, data):
    assert ask("verify", run)[0] == 0
    assert ask("verify", run / "000002")[0] == 0
    damage(run, 2)
    status, text = ask("verify", run)
    assert status == 1
    assert "'model/w'" in text
    found = data("verify", run)[1]["checkpoints"]
    assert [one["ok"] for one in found] == [True, False, True]
    status, found = data("diff", run / "000001", run / "000002", "--values")
    assert status == 1
    assert list(found["damage"]) == ["model/w"]
    status, text = ask("diff", run / "000001", run / "000002", "--values")
    assert "\n- 'model/w': " in text


def test_rm(run, ask):
    status, text = ask("rm", run, 1, 9)
    assert status == 2
    assert "The steps there are 1, 2, 3" in text
    assert ask("rm", run, 1, 3)[0] == 0
    assert eqx_ckpt.CheckpointManager(run).steps() == [2]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["ls", "none"], "There is no step"),
        (["ls", "a run/000001"], "There is no step"),
        (["tree", "none"], "No committed checkpoint"),
        (["tree", "a run"], "It holds the checkpoints"),
        (["tree", "a run/000001", "mode"], "no leaf"),
        (["verify", "none"], "No committed checkpoint"),
        (["verify", "a run", "--digest", "0" * 64], "a run/000003'."),
        (["verify", "a run/000001", "--digest", ""], "`--digest` is ''. Pass 64"),
        (["ls", "a run", "--mode", "least"], "'least'"),
        (["ls", "ftp://x/y"], "not supported"),
        (["ls", "s3://a..b/c"], "at 'a..b/c/': Invalid"),
        (["look"], "No such command"),
        (["ls"], "RUN"),
        (["rm", "a run", "one"], "integer. Try `"),
        (["rm", "a run", "--", "-1"], "-1 is not a step"),
        (["rm", "a run/000001", "1"], "/000001'. It is one checkpoint"),
        (["rm", "none", "1"], "There are no steps."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_mistakes(run, ask, monkeypatch, arguments, problem):
    monkeypatch.chdir(run.parent)
    status, text = ask(*arguments)
    assert status == 2
    assert problem in text


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_step_that_cannot_be_read(run, ask, data, refuse, code):
    """The others are listed, verified and reported all the same."""
    refuse("000002", code)
    problem = os.strerror(code)
    status, listed = data("ls", run)
    assert status == 2
    problems = {entry["step"]: entry["problem"] for entry in listed["steps"]}
    assert problem in problems.pop(2)
    assert problems == {1: None, 3: None}
    status, text = ask("verify", run)
    assert status == 2
    assert [line.split()[0] for line in text.splitlines()] == ["ok", "[Errno", "ok"]
    status, text = ask("tree", run / "000002")
    assert status == 2
    assert problem in text
    pytest.importorskip("plotly")
    status, text = ask("report", run, "-o", run / "page.html")
    assert status == 2
    assert text.startswith("Step 2 cannot be read. [Errno")
    assert '"label":"3"' in (run / "page.html").read_text()


def test_rm_looks_only_at_the_steps_it_removes(run, ask, refuse):
    refuse("000002", errno.EIO)
    (run / "000009").mkdir()
    status, text = ask("rm", run, 1, 2)
    assert status == 2
    assert os.strerror(errno.EIO) in text
    assert "are 1, 2, 3." in ask("rm", run, 9)[1]
    assert ask("rm", run, 1, 3)[0] == 0
    assert besides_metrics(run) == ["000002", "000009"]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("command", ["stats", "verify", "diff", "show", "report"])
def test_a_chunk_that_cannot_be_read(run, ask, refuse, command, code):
    """It may be intact: that is trouble, and no damage."""
    if command == "report":
        pytest.importorskip("plotly")
    refuse("000001/model/w/c", code)
    options = {
        "diff": [run / "000002", "--values"],
        "show": ["model/w"],
        "report": ["-o", run / "page.html"],
    }
    status, text = ask(command, run / "000001", *options.get(command, []))
    assert status == 2
    assert os.strerror(code) in text
    assert "damaged" not in text


def test_without_arguments(ask):
    status, text = ask()
    assert status == 2
    assert "Usage: " in text
    assert "eqx-ckpt: " not in text


@pytest.mark.parametrize(
    ("module", "name"),
    [(importlib.util, "find_spec"), (run_commands, "read_manifest")],
)
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_ctrl_c(run, ask, monkeypatch, module, name, options):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, interrupted)
    assert ask("ls", run, *options)[0] == 130


@pytest.mark.parametrize(
    ("shell", "path", "expected"), [("$@ >&-", "000001", 0), ("$@ 2>&-", "none", 2)]
)
def test_a_stream_that_was_closed_before(run, shell, path, expected):
    command = [sys.executable, "-m", "eqx_ckpt", "tree", path]
    words = ["sh", "-c", shell, "sh", *command]
    done = subprocess.run(words, cwd=run, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (expected, b"", b"")


def test_a_closed_pipe(run):
    """In a process of its own: it ends, and does not complain."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "eqx_ckpt", "tree", str(run / "000001")]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=300)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has it")
def test_an_output_that_is_full(run):
    """What is full is the output, and not what was written before."""
    words = [sys.executable, "-m", "eqx_ckpt", "copy", "000001", "new"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            words, cwd=run, stdout=full, stderr=subprocess.PIPE, timeout=300
        )
    assert done.returncode == 2
    assert done.stderr.endswith(b"No space left on device: 'standard output'\n")
    assert eqx_ckpt.inspect.verify(run / "new")


def test_the_docs_name_all_commands_and_keys(run, data):
    text = DOCS.read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.M))
    ckpt = run / "000001"
    calls = {
        "ls": [run],
        "tree": [ckpt],
        "show": [ckpt, "model/w"],
        "stats": [ckpt],
        "diff": [ckpt, run / "000002", "--values"],
        "verify": [ckpt],
        "digest": [ckpt],
        "gc": [run, "--dry-run"],
    }
    dead_save(run, 4)
    assert rows.keys() == calls.keys()
    for command, arguments in calls.items():
        documented = set(re.findall(r"`(\w+)`", rows[command])) - {"null", "false"}
        assert documented - keys_of(data(command, *arguments)[1]) == set()


def keys_of(found):
    """The keys of an object, and of those in its lists and objects."""
    keys = set(found) if isinstance(found, dict) else set()
    items = found.values() if isinstance(found, dict) else found
    for item in items:
        if isinstance(item, dict | list):
            keys |= keys_of(item)
    return keys
