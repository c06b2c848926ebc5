"""The benchmarks work, on the smallest trees; nothing here depends on a clock."""

import importlib.util

import jax.numpy as jnp
import pytest

from benchmarks import cold, measure, table, tables, workloads
from benchmarks.faults import __main__ as faults


pytestmark = pytest.mark.once


@pytest.mark.parametrize("peer", ["eqx_ckpt", "equinox"])
def test_what_is_measured_comes_back(tmp_path, peer):
    path = tmp_path / "saved"
    saved = measure.save(peer, "B", "small", path)
    assert saved["nbytes"] > 0
    assert set(measure.restore(peer, "B", "small", path)) >= {"first", "steady"}


def test_a_part_is_measured(tmp_path):
    measure.save("eqx_ckpt", "B", "small", tmp_path / "saved")
    assert "first" in measure.restore("eqx_ckpt", "D", "small", tmp_path / "saved")
    with pytest.raises(NotImplementedError, match="cannot restore a part"):
        measure.restore("equinox", "D", "small", tmp_path / "saved")


def test_another_mesh_is_measured(tmp_path):
    saved = measure.save("eqx_ckpt", "E", "small", tmp_path / "saved")
    restored = measure.restore("eqx_ckpt", "E", "small", tmp_path / "saved")
    assert restored["read"] >= saved["nbytes"]
    result = {"workload": "E", "peer": "eqx_ckpt", **saved, **restored}
    assert "| E | bytes that a restore reads |" in table.ratios([result])


def test_a_save_in_the_background_is_measured(tmp_path):
    measured = measure.run("background", "eqx_ckpt", "B", "small", tmp_path / "saved")
    assert measured.keys() >= {"blocked_first", "blocked", "blocked_step"}, measured
    with pytest.raises(NotImplementedError, match="in the background"):
        measure.background("equinox", "B", "small", tmp_path / "other")


def test_a_manager_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_STEPS", 5)
    saves = measure.manager("eqx_ckpt", "B", "small", tmp_path / "saves")
    calls = measure.listing("eqx_ckpt", table.LISTING, "small", tmp_path / "calls")
    results = [
        {"workload": "B", "peer": "eqx_ckpt", **saves},
        {"workload": table.LISTING, "peer": "eqx_ckpt", **calls},
    ]
    assert "| B | save by a manager |" in table.ratios(results)
    assert "| 1000 steps | `latest()` |" in table.ratios(results)
    assert "| `steps()`, s |" in table.seconds(results, table.LISTING)


def test_a_measurement_has_a_process_of_its_own(tmp_path):
    result = measure.run("imports", "eqx_ckpt", "import", "small", tmp_path)
    assert "import" in result, result
    result = measure.run("restore", "equinox", "B", "small", tmp_path)
    assert "No such file" in result["error"]


@pytest.mark.parametrize(
    "restored",
    [
        {"a": jnp.ones(3)},
        {"a": jnp.zeros(3, jnp.bfloat16)},
        {"a": -jnp.zeros(3)},
        {"b": jnp.zeros(3)},
    ],
)
def test_other_values_are_an_error(restored):
    expected = {"a": jnp.zeros(3)}
    workloads.check_same(expected, expected)
    with pytest.raises(ValueError, match="a"):
        workloads.check_same(restored, expected)


def test_no_two_leaves_of_a_workload_are_alike():
    for name in ("A", "B", "C"):
        leaves = workloads.named(workloads.filled(workloads.skeleton(name, "small")))
        contents = {(leaf.shape, leaf.tobytes()) for leaf in leaves.values()}
        assert len(contents) == len(leaves)


def test_the_table_says_what_is_reached():
    def result(peer, first):
        return {"workload": "C", "peer": peer, "first": first}

    results = [
        *(result("eqx_ckpt", seconds) for seconds in (0.1, 0.2, 0.9)),
        result("orbax", 2.0),
        result("orbax-v1", 1.0),
        {"workload": "C", "peer": "orbax", "action": "restore", "error": "no disk"},
    ]
    (row,) = [line for line in table.ratios(results).splitlines() if "| C |" in line]
    assert "0.2 (0.1-0.9) s | best orbax: 1 s (orbax-v1) | 0.20 | <= 0.2 | yes" in row
    results.append(result("orbax", 0.2))
    assert "**no**" in table.ratios([*results, result("orbax", 0.2)])
    assert table.failures(results) == ["orbax, C, restore: no disk"]


def test_faults_are_done(capfd):
    which = ["--peers", "eqx_ckpt", "equinox", "--faults", "bit", "--repeats", "3"]
    assert faults.main(which) == 0
    assert "| one flipped bit | 3 error | 3 **silent** |" in capfd.readouterr().out


def test_cold_reads_are_measured(tmp_path, capsys, monkeypatch):
    arguments = ["cold", "--width", "48", "--rounds", "1", "--dir", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    cold.main()
    assert "| verify |" in capsys.readouterr().out


def test_each_can_be_imported():
    for path in (measure.ROOT / "benchmarks").glob("*.py"):
        importlib.import_module(f"benchmarks.{path.stem}")


def test_the_commands_of_the_documentation_are_benchmarks():
    known = dict(tables.commands())
    assert {"main", "mirror", "recording", "forecast"} <= known.keys()
    for command in known.values():
        assert importlib.util.find_spec(command.split()[2])
