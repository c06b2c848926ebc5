"""The JSON of each command is what its documented schema says."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt.__main__ import main

from .conftest import dead_save


pytest.importorskip("typer")
jsonschema = pytest.importorskip("jsonschema")
PAGE = Path(__file__).parents[2] / "docs/usage/commandline.schema.json"
SCHEMA = json.loads(PAGE.read_text())


def check(command, found):
    """Raise unless a document is what the schema of a command says."""
    schema = SCHEMA | {"$ref": f"#/$defs/{command}"}
    jsonschema.Draft202012Validator(schema).validate(found)


@pytest.fixture
def odd(tmp_path):
    """A checkpoint of what is not ordinary, in a folder whose name is not either."""
    mesh = jax.make_mesh((2,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    tree = {
        "<script>alert(1)</script>": np.array([np.nan, np.inf, 1.0]),
        "ein Baum 🌳": np.array([1 + 2j]),
        "dates": np.array(["2026-01-02", "NaT"], "M8[D]"),
        "sharded": jax.device_put(np.zeros(4, np.float32), sharding),
        "empty": np.zeros((0, 3), np.int8),
        "key": jax.random.key(0),
        "step": 10**30,
        "huge": 10**5000,
        "nan": float("nan"),
        "flag": True,
        "text": "is not saved",
    }
    path = tmp_path / "two words ü"
    eqx_ckpt.tree_serialise_leaves(path, tree, metadata={"<b>": [float("inf"), None]})
    return path


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        check("ls", {"run": "a", "steps": [{"step": 1}]})


def test_commands_that_look_at_one_checkpoint(odd, data):
    for command in ("tree", "stats", "verify", "digest"):
        check(command, data(command, odd)[1])
    for name in eqx_ckpt.inspect.read_manifest(odd).leaves:
        check("show", data("show", odd, name)[1])


def test_diff(odd, run, tmp_path, data):
    for other in (odd, run / "000001"):
        for options in ([], ["--values"]):
            check("diff", data("diff", odd, other, *options)[1])
    tree = {"w": np.zeros(3), "n": 1}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "a", tree)
    tree = {"w": np.array([0, np.nan, np.inf]), "n": 2}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "b", tree)
    found = data("diff", tmp_path / "a", tmp_path / "b", "--values")[1]
    assert len(found["leaves"]) == 2
    check("diff", found)


def test_commands_for_runs(run, data):
    (run / "000001/model/w/c.0.0").write_bytes(b"")
    (run / "000002/zarr.json").write_bytes(b"{}")
    dead_save(run, 9)
    for command, *options in (["ls", "--best", "loss"], ["verify"], ["gc", "-n"]):
        check(command, data(command, run, *options)[1])
    for command in ("stats", "tree", "verify"):
        check(command, data(command, run / "000001")[1])


def test_without_a_manifest_there_is_nothing_to_describe(run, data, capsys):
    """A line on standard error says why, and nothing is printed that is not JSON."""
    manifest = run / "000002/zarr.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"model", b"modem"))
    broken, whole = run / "000002", run / "000001"
    calls = {"tree": [], "stats": [], "digest": [], "show": ["step"], "diff": [whole]}
    for command, arguments in calls.items():
        words = [command, broken, *arguments, "--json"]
        status = main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert (status, out) == (1, "")
        assert err.startswith("eqx-ckpt: ")
    assert data("verify", broken)[0] == 1
    assert data("ls", run)[0] == 1
