"""The page about a checkpoint or a run: what it says, whatever it is given."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt.__main__ import main


pytest.importorskip("plotly")


def facts(page):
    text = page.read_text()
    (found,) = re.findall(r'<script type="application/json" id="facts">(.*?)<', text)
    return json.loads(found, parse_constant=pytest.fail)


@pytest.fixture
def report(tmp_path):
    """Writes a page: its alerts, what it knows, and its leaves by name."""

    def report(*arguments, **keywords):
        page = tmp_path / "out/a page.html"
        source, *other = arguments
        alerts = eqx_ckpt.inspect.write_report(
            source, page, *other, overwrite=True, **keywords
        )
        found = facts(page)
        assert alerts == [alert["text"] for alert in found["alerts"]]
        return alerts, found, {leaf["name"]: leaf for leaf in found["leaves"]}

    return report


class InMemory(eqx_ckpt.interop.Source):
    """Arrays by name; counts what is read."""

    def __init__(self, arrays, refused=()):
        self.arrays, self.refused = arrays, refused
        self.reads, self.most = [], 0

    @property
    def manifest(self):
        records = {
            name: eqx_ckpt.inspect.LeafRecord.of_array(
                array.shape,
                array.dtype,
                path=[
                    ("index", int(part)) if part.isdecimal() else ("key", part)
                    for part in name.split("/")
                ],
                kind="numpy",
            )
            for name, array in self.arrays.items()
        }
        return eqx_ckpt.inspect.Manifest(records)

    def read(self, reads, damage, report=None):
        if any(read.name in self.refused for read in reads):
            raise PermissionError(13, "Permission denied")
        self.reads += [(read.name, str(read.region)) for read in reads]
        self.most = max(self.most, sum(read.nbytes for read in reads))
        return [
            self.arrays[read.name][read.region].copy().view(read.record.data_type)
            for read in reads
        ]

    def __str__(self):
        return "arrays in memory"


def state(step):
    w = jnp.arange(6.0).reshape(2, 3) * step
    return {"model": {"w": w, "b": jnp.ones(3)}, "step": step, "key": jax.random.key(0)}


@pytest.fixture
def run(tmp_path):
    with eqx_ckpt.CheckpointManager(tmp_path / "a run ü") as manager:
        for step in (1, 2, 4):
            metadata = {"loss": 1 / step, "eval": {"ok": True, "f1": step}, "n": "x"}
            manager.save(step, state(step), metadata=metadata)
    return tmp_path / "a run ü"


def test_steps_that_share_most_of_their_bytes(tmp_path, report):
    tree = {"base": np.arange(1000.0), "n": np.zeros(3)}
    with eqx_ckpt.CheckpointManager(tmp_path, incremental=True) as manager:
        for step in (1, 2):
            manager.save(step, {**tree, "n": tree["n"] + step})
    first, second = (column["notes"] for column in report(tmp_path)[1]["columns"])
    assert first == second
    assert first[0].startswith("its deletion frees ")


def test_steps_that_did_not_lead_to_the_newest_one(run, report):
    with eqx_ckpt.CheckpointManager(run) as manager:
        manager.save(5, manager.restore(state(2), 2))
    notes = {c["label"]: c["notes"] for c in report(run)[1]["columns"]}
    assert notes == {"1": [], "2": [], "4": ["fork of step 2"], "5": []}
    history = report(run / "000005")[1]["columns"][0]["history"]
    assert [session[1] for session in history["sessions"]] == [None, 2]


def test_a_checkpoint(run, report):
    alerts, found, leaves = report(run / "000002")
    assert alerts == []
    assert found["kind"] == "checkpoint"
    assert list(leaves) == ["key", "model/b", "model/w", "step"]
    stats = eqx_ckpt.inspect.stats(run / "000002")["model/w"]
    assert leaves["model/w"]["stats"]["max"] == stats.max == 10
    assert leaves["model/w"]["stats"]["norm"] == pytest.approx(stats.norm, rel=1e-5)
    assert sum(leaves["model/w"]["histogram"]["counts"]) == 6
    assert leaves["step"]["value"] == "2"
    assert leaves["step"]["dtype"] == "Python int"
    assert leaves["model/w"]["dtype"] == "float32"
    assert leaves["key"]["histogram"] is None
    assert found["columns"][0]["metadata"]["n"] == "x"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_histograms_count_every_number_once(dtype, report):
    """In pieces or at once: the bins are those of the whole."""
    draw = np.random.default_rng(0).normal(size=2**21) * 30
    draw[2**20 :] *= 100 / 30
    draw = draw > 0 if dtype == "bool" else draw.clip(-128, 127)
    array = draw.astype(jnp.dtype(dtype))
    source = InMemory({"w": np.concatenate([array] * 4)})
    found = report(source)[2]["w"]["histogram"]
    counts, low, width = found["counts"], found["low"], found["width"]
    wide = (np.abs(array) if dtype == "complex64" else array).astype(np.float64)
    edges = low + width * np.arange(len(counts) + 1)
    assert edges[0] <= wide.min() < wide.max() < edges[-1]
    assert 4 * np.histogram(wide, edges)[0] == pytest.approx(counts, abs=0)
    assert 2 <= len(counts) <= 48
    assert dtype != "bool" or counts[0] + counts[-1] == 2**23


def test_histograms_of_extremes(report):
    arrays = {
        "zero": np.zeros(5),
        "huge": np.array([-1.7e308, 1.7e308, np.inf]),
        "tiny": np.array([5e-324, 0.0]),
        "close": np.array([1.0, np.nextafter(1, 2)]),
        "all_bad": np.array([np.nan, np.inf], np.float32),
        "empty": np.zeros((0, 3)),
        "one": np.array(-7),
        "big": np.array([2**63 - 1, -(2**63)]),
        "dates": np.array(["2026-01-02", "NaT"], "M8[D]"),
    }
    alerts, _, leaves = report(InMemory(arrays))
    assert len(alerts) == 1
    counted = {
        name: sum(leaf["histogram"]["counts"]) if leaf["histogram"] else None
        for name, leaf in leaves.items()
    }
    assert [*counted.values()] == [5, 2, 2, 2, None, None, 1, 2, None]
    assert leaves["dates"]["stats"]["min"] == "2026-01-02"


def test_a_run(run, report):
    alerts, found, leaves = report(run)
    assert alerts == []
    assert [column["label"] for column in found["columns"]] == ["1", "2", "4"]
    assert found["curve"] == {
        "steps": [1, 2, 4],
        "metrics": {"loss": [1, 0.5, 0.25], "eval/f1": [1, 2, 4]},
    }
    norm = np.linalg.norm(np.arange(6))
    expected = [pytest.approx(norm * step, rel=1e-5) for step in (1, 2, 4)]
    assert leaves["model/w"]["norms"] == expected
    assert leaves["model/w"]["changes"] == expected[:2]
    assert leaves["model/b"]["changes"] == [0, 0]
    assert leaves["step"]["changes"] == [1, 2]
    assert leaves["model/w"]["first"] != leaves["model/w"]["histogram"]
    assert report(run, steps=2)[2]["model/w"]["changes"] == [
        pytest.approx(norm * 3, rel=1e-5)
    ]
    labels = [column["label"] for column in report(run, steps=1)[1]["columns"]]
    assert labels == ["4"]


def test_a_run_whose_leaves_change(tmp_path, report):
    trees = [
        {"a": jnp.ones(2), "b": jnp.ones(3)},
        {"a": jnp.ones(4)},
        {"a": jnp.ones(4)},
    ]
    with eqx_ckpt.CheckpointManager(tmp_path / "run") as manager:
        for step, tree in enumerate(trees):
            manager.save(step, tree)
    _, _, leaves = report(tmp_path / "run")
    assert leaves["a"]["changes"] == [None, 0]
    assert leaves["b"]["status"] == "not in the last step"
    assert leaves["b"]["norms"][1:] == [None, None]


def test_a_change_whose_square_no_float_holds(tmp_path, report):
    with eqx_ckpt.CheckpointManager(tmp_path / "run") as manager:
        for step, size in enumerate([0.0, 3e200, 3e-200]):
            manager.save(step, {"a": np.array([0.0, size, size])})
    _, _, leaves = report(tmp_path / "run")
    assert leaves["a"]["norms"] == pytest.approx([0, 18**0.5 * 1e200, 18**0.5 * 1e-200])
    assert leaves["a"]["changes"] == pytest.approx([18**0.5 * 1e200] * 2)


def test_a_metric_of_a_removed_step_is_not_finite(tmp_path):
    run, keep = tmp_path / "run", eqx_ckpt.keep_last(1)
    with eqx_ckpt.CheckpointManager(run, keep=keep) as manager:
        for step, loss in enumerate([1.0, float("nan"), 0.5]):
            manager.save(step, {"step": step}, metadata={"loss": loss})
    found = eqx_ckpt.inspect.write_report(run, tmp_path / "report.html")
    assert found == ["The metric 'loss' is not finite, in 1"]


def test_what_is_wrong_gives_alerts(run, report):
    bad = state(5)
    bad["model"]["b"] = jnp.array([1, jnp.nan, jnp.inf])
    with eqx_ckpt.CheckpointManager(run) as manager:
        manager.save(5, bad, metadata={"loss": float("nan")})
        manager.save(6, state(6))
    (run / "000001/model/w/c.0.0").write_bytes(b"\1" * 28)
    manifest = run / "000002/zarr.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"model", b"modem"))
    alerts, found, leaves = report(run)
    broken, damaged, numbers, metric = alerts
    assert broken.startswith("Step 2 is damaged")
    assert damaged.startswith("1 leaf is damaged, in 1: model/w: ")
    assert numbers == "1 leaf has NaNs or infinities, in 5"
    assert metric == "The metric 'loss' is not finite, in 5"
    assert found["alerts"][2]["leaves"] == ["model/b"]
    assert leaves["model/b"]["bad"] == [0, 0, 2, 0]
    assert leaves["model/w"]["norms"][0] is None
    assert leaves["model/w"]["changes"][0] is None
    assert leaves["model/w"]["changes"][1] > 0
    alerts, _, leaves = report(run / "000001")
    assert leaves["model/w"]["status"] == "damaged"
    assert leaves["model/w"]["stats"] is None
    with pytest.raises(eqx_ckpt.CorruptCheckpointError):
        report(run / "000002")


def test_steps_that_vanish(run, report, monkeypatch):
    from support import Run

    monkeypatch.setattr(Run, "readable_or_not", lambda self: [1, 2, 3, 4])
    alerts, found, _ = report(run)
    assert alerts == ["Step 3 is gone, or was never complete."]
    assert len(found["columns"]) == 3
    monkeypatch.setattr(Run, "readable_or_not", lambda self: [3])
    with pytest.raises(eqx_ckpt.CheckpointError, match="No step of .* can be read"):
        report(run)


def test_what_is_replaced_meanwhile_is_read_again(tmp_path, report, monkeypatch):
    from support import write_report as write

    path, facts_of = tmp_path / "ckpt", write.facts_of
    eqx_ckpt.tree_serialise_leaves(path, {"w": jnp.zeros(3)})

    def replaced(columns):
        eqx_ckpt.tree_serialise_leaves(path, {"w": jnp.ones(3)}, overwrite=True)
        monkeypatch.setattr(write, "facts_of", facts_of)
        return facts_of(columns)

    monkeypatch.setattr(write, "facts_of", replaced)
    alerts, _, leaves = report(path)
    assert alerts == []
    assert leaves["w"]["stats"]["min"] == 1


def test_two_checkpoints(run, tmp_path, report):
    other = {"model": {"w": state(4)["model"]["w"], "c": jnp.ones(3)}, "step": 1.0}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "other", other)
    _, found, leaves = report(run, tmp_path / "other")
    assert found["kind"] == "comparison"
    assert leaves["step"]["differ"] is None
    assert {name: leaf["status"] for name, leaf in leaves.items()} == {
        "model/c": "only in B",
        "model/w": "equal",
        "step": "was Python int",
        "key": "only in A",
        "model/b": "only in A",
    }
    _, _, leaves = report(run / "000001", run / "000002")
    assert leaves["model/w"]["status"] == "changed"
    assert leaves["model/w"]["differ"] == 5
    assert leaves["model/w"]["largest"] == 5
    assert leaves["step"]["status"] == "changed"
    assert leaves["key"]["status"] == "equal"


def test_a_file_that_does_not_keep_names(tmp_path, report):
    tree = {"layers": {"0": jnp.ones(3)}, "a.b": jnp.arange(3.0)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "a", tree)
    eqx_ckpt.interop.to_safetensors(tmp_path / "a", tmp_path / "b.safetensors")
    source = eqx_ckpt.interop.open_safetensors(tmp_path / "b.safetensors")
    for pair in ((tmp_path / "a", source), (source, tmp_path / "a")):
        leaves = report(*pair)[2]
        assert [leaf["status"] for leaf in leaves.values()] == ["equal", "equal"]
    eqx_ckpt.copy(source, tmp_path / "c")
    (tmp_path / "c/a/b/c.0").write_bytes(b"damaged")
    alerts, _, leaves = report(tmp_path / "c", tmp_path / "a")
    assert leaves["a.b"]["status"] == "damaged in A"
    assert [alert.split(",")[0] for alert in alerts] == ["1 leaf is damaged"]
    assert "a.b: " in alerts[0]


def test_how_far_leaves_are_apart(tmp_path, report):
    """Two NaNs are equal, and infinitely far from numbers; keys have no distance."""
    ours = {
        "same": np.array([np.nan, 1.0]),
        "nan": np.array([np.nan, 1.0]),
        "int": np.array([2**60, 5]),
        "year": np.array(["2020", "NaT"], "M8[Y]"),
        "key": jax.random.key(0),
        "number": 2.0,
        "lost": math.nan,
    }
    other = ours | {
        "nan": np.array([1.0, np.nan]),
        "int": np.array([2**60 + 1, 5]),
        "year": np.array(["2022", "NaT"], "M8[Y]"),
        "key": jax.random.key(1),
        "number": 3.0,
        "lost": 1.0,
    }
    eqx_ckpt.tree_serialise_leaves(tmp_path / "a", ours)
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", other)
    leaves = report(tmp_path / "a", tmp_path / "b")[2]
    found = {name: (leaf["differ"], leaf["largest"]) for name, leaf in leaves.items()}
    assert found == {
        "same": (0, 0),
        "nan": (2, "inf"),
        "int": (1, 1),
        "year": (1, 2),
        "key": (1, None),
        "number": (1, 1),
        "lost": (1, "inf"),
    }


def test_each_byte_is_read_once_and_little_at_a_time(report):
    arrays = {f"w{i}": np.ones((2**20, 5), np.float32) for i in range(3)}
    sources = InMemory(arrays), InMemory(arrays)
    report(*sources)
    for source in sources:
        assert len(source.reads) == len(set(source.reads)) >= 9
        assert source.most <= 16 * 2**20


def test_a_leaf_that_may_not_be_read(report):
    source = InMemory({"a": np.ones(3), "b": np.ones(3)}, refused=["a"])
    alerts, _, leaves = report(source)
    assert alerts == ["1 leaf is unreadable: a: Permission denied"]
    assert leaves["a"]["status"] == "unreadable"
    assert leaves["b"]["stats"]["norm"] > 0
    other = InMemory(source.arrays)
    assert report(source, other)[2]["a"]["status"] == "unreadable in A"


def test_names_and_metadata_are_text(tmp_path, report):
    evil = "</script><script>alert(1)</script><!--\u2028"
    metadata = {evil: evil, "deep": [{evil: float("nan")}]}
    path = tmp_path / "<script>alert(1)<"
    tree = {evil: jnp.array([1.0, jnp.nan]), "static": evil}
    eqx_ckpt.tree_serialise_leaves(path, tree, metadata=metadata)
    assert report(path)[1]["columns"][0]["metadata"][evil] == evil
    text = (tmp_path / "out/a page.html").read_text()
    assert "<script>alert" not in text
    assert "<title>" + str(tmp_path) + "/&lt;script&gt;" in text


def test_the_curve_has_all_steps(tmp_path, report):
    keep = [eqx_ckpt.keep_last(3)]
    with eqx_ckpt.CheckpointManager(tmp_path / "run", keep=keep) as manager:
        for step in range(1, 6):
            manager.save(step, {"w": jnp.ones(2)}, metadata={"loss": step / 2})
    _, found, _ = report(tmp_path / "run", steps=2)
    assert [column["label"] for column in found["columns"]] == ["3", "5"]
    assert found["curve"]["steps"] == [1, 2, 3, 4, 5]
    assert found["curve"]["metrics"] == {"loss": [0.5, 1, 1.5, 2, 2.5]}


@pytest.mark.parametrize("digits", [400, 3900, 5000])
def test_integers_that_no_float_holds(tmp_path, report, digits):
    number = 10**digits
    metadata = {"n": number} if digits < 4000 else None
    step = tmp_path / "c/000001"
    eqx_ckpt.tree_serialise_leaves(step, {"n": number}, metadata=metadata)
    alerts, found, leaves = report(tmp_path / "c")
    assert alerts == []
    assert leaves["n"]["stats"]["max"] == leaves["n"]["value"]
    if metadata:
        assert found["columns"][0]["metadata"] == {"n": str(number)}
        assert found["curve"]["metrics"] == {"n": [str(number)]}


def test_much_metadata_is_not_shown(tmp_path, report):
    many = {f"metric {i}": float(i) for i in range(5000)}
    step = tmp_path / "c/000001"
    eqx_ckpt.tree_serialise_leaves(step, {"w": jnp.ones(2)}, metadata=many)
    _, found, _ = report(tmp_path / "c")
    assert len(found["curve"]["metrics"]) == 200
    assert "not shown" in found["columns"][0]["metadata"]


def test_a_recording(tmp_path, report):
    like = {"x": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with eqx_ckpt.recording.Recording(tmp_path / "r", like) as recording:
        recording.extend({"x": np.arange(6.0, dtype=np.float32).reshape(3, 2)})
        recording.commit({"step": 3})
    _, found, leaves = report(tmp_path / "r")
    assert found["kind"] == "checkpoint"
    assert [leaf["stats"]["max"] for name, leaf in leaves.items() if "x" in name] == [5]


def test_without_plotly(run, tmp_path, monkeypatch, capsys):
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'eqx-ckpt\[report\]'"):
        eqx_ckpt.inspect.write_report(run, tmp_path / "page.html")
    pytest.importorskip("typer")
    assert main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 2
    assert "pip install" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_nothing_is_written_without_a_page(run, tmp_path):
    for missing in (tmp_path / "missing", tmp_path):
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError):
            eqx_ckpt.inspect.write_report(missing, tmp_path / "pages/page.html")
    assert not (tmp_path / "pages").exists()
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="another path"):
        eqx_ckpt.inspect.write_report(run, tmp_path)
    (tmp_path / "weights").write_bytes(b"mine")
    for overwrite in (False, True):
        with pytest.raises(eqx_ckpt.CheckpointExistsError, match="weights"):
            eqx_ckpt.inspect.write_report(
                run, tmp_path / "weights", overwrite=overwrite
            )
    assert (tmp_path / "weights").read_bytes() == b"mine"
    with pytest.raises(ValueError, match="`steps` is 0. Pass an integer of at least"):
        eqx_ckpt.inspect.write_report(run, tmp_path / "page.html", steps=0)


def test_the_command(run, tmp_path, capsys):
    pytest.importorskip("typer")
    page = tmp_path / "p.html"
    assert main(["report", str(run), "-o", str(page)]) == 0
    assert "wrote" in capsys.readouterr().out
    assert facts(page)["kind"] == "run"
    first, second = str(run / "000001"), str(run / "000002")
    assert main(["report", first, second, "-o", str(page)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert facts(page)["kind"] == "run"
    to = ["-o", str(page), "--overwrite"]
    assert main(["report", first, second, *to]) == 0
    assert facts(page)["kind"] == "comparison"
    np.savez(tmp_path / "x.npz", w=np.ones(3))
    assert main(["report", str(tmp_path / "x.npz"), *to]) == 0
    assert facts(page)["leaves"][0]["name"] == "w"
    (run / "000004/model/w/c.0.0").write_bytes(b"\1" * 28)
    assert main(["report", str(run), *to, "--steps", "2"]) == 1
    assert "is damaged" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "no"), *to]) == 2
    assert main(["report", str(run), "-o", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
