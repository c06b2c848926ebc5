"""Commands that write: `copy`, `convert`, `gc`."""

import fcntl
import os

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_ckpt
from helpers import assert_same

from .conftest import dead_save


pytest.importorskip("typer")


def make_model():
    """What `--like` names."""
    return eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(7))


def make_of_header(header):
    assert header == {"count": 1}
    return make_model()


def make_wide(width):
    """What `--like` cannot call."""
    return eqx.nn.Linear(2, width, key=jax.random.key(7))


def make_nothing():
    """What fails when `--like` calls it."""
    return {}["none"]


def make_exit():
    """What ends the program when `--like` calls it."""
    raise SystemExit(0)


def make_end():
    """What no `except Exception` stops."""
    raise GeneratorExit


def make_none():
    """A function that forgets to return what it makes."""


def make_elsewhere():
    """What leaves the working directory, as some frameworks do."""
    os.chdir("/")
    return make_model()


@pytest.fixture
def ckpt(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "c", make_model(), metadata={"n": 1})
    return tmp_path / "c"


def arrays(source):
    """The leaves as arrays, by what all formats keep of their names."""
    found = eqx_ckpt.interop.open_source(source)
    return {
        name: np.asarray(value)
        for name, _, value in eqx_ckpt.inspect.iter_leaves(found)
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("m.safetensors", []),
        ("m.npz", []),
        ("m.msgpack", []),
        ("m.st", ["--to", "safetensors"]),
        ("orbax", ["--to", "orbax"]),
        ("other", ["--to", "checkpoint"]),
    ],
)
def test_there_and_back(tmp_path, ckpt, ask, data, name, options):
    if "orbax" in options:
        pytest.importorskip("orbax.checkpoint")
    status, text = ask("convert", ckpt, tmp_path / name, *options)
    assert status == 0, text
    assert f"written to {tmp_path / name}" in text
    assert ("does not keep" in text) == ("checkpoint" not in options)
    assert ask("tree", tmp_path / name)[0] == 0
    assert data("stats", tmp_path / name)[0] == 0
    assert ask("convert", tmp_path / name, tmp_path / "b", "--to", "checkpoint")[0] == 0
    assert_same(arrays(tmp_path / "b"), arrays(ckpt))
    assert ask("diff", ckpt, tmp_path / "b", "--values")[0] in (0, 1)
    assert ask("verify", tmp_path / name)[0] == 0


@pytest.mark.parametrize("make", ["make_model", "make_elsewhere"])
def test_files_of_equinox(tmp_path, ckpt, ask, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    like = ["--like", f"{__name__}:{make}"]
    assert ask("convert", "c", "m.eqx", *like)[0] == 0
    again = eqx.tree_deserialise_leaves(tmp_path / "m.eqx", make_model())
    assert_same(again, make_model())
    back = ["convert", tmp_path / "m.eqx", tmp_path / "b", "--to", "checkpoint"]
    assert ask(*back, *like)[0] == 0
    assert_same(arrays(tmp_path / "b"), arrays(ckpt))
    status, text = ask(*back)
    assert status == 2
    assert "which has no names" in text
    # A function of the header, for a file without a suffix.
    header = b'{"count": 1}\n'
    (tmp_path / "bare").write_bytes(header + (tmp_path / "m.eqx").read_bytes())
    of_header = ["--like", f"{__name__}:make_of_header", "--format", "eqx"]
    back = ["convert", tmp_path / "bare", tmp_path / "e", "--to", "checkpoint"]
    assert ask(*back, *of_header)[0] == 0
    assert_same(arrays(tmp_path / "e"), arrays(ckpt))
    manifest = eqx_ckpt.inspect.read_manifest(tmp_path / "e")
    assert manifest.metadata == {"count": 1}
    for command in (["tree"], ["stats"], ["copy", tmp_path / "new"]):
        status, text = ask(command[0], tmp_path / "m.eqx", *command[1:])
        assert status == 2
        assert "`eqx-ckpt convert` does, with `--like" in text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["m.unknown"], "The suffix of 'm.unknown' names no format"),
        (["m"], "pass `--to`"),
        (["m.npz", "--to", "zip"], "'zip'"),
        (["m.npz", "--strict"], "Leave out `--strict`"),
        (["m.eqx"], "Pass `--like MODULE:NAME`"),
        (["m.eqx", "--like", "nonsense"], "is not `MODULE:NAME`"),
        (["m.eqx", "--like", "no_such_module:f"], "No module named"),
        (["m.eqx", "--like", f"{__name__}:missing"], "no attribute 'missing'"),
        (["m.eqx", "--like", f"{__name__}:make_wide"], "in the order of a PyTree"),
        (["m.eqx", "--like", f"{__name__}:make_nothing"], "`: KeyError: 'none'"),
        (["m.eqx", "--like", f"{__name__}:make_exit"], "`: SystemExit: 0"),
        (["m.eqx", "--like", f"{__name__}:make_end"], "`: GeneratorExit: "),
        (["m.eqx", "--like", f"{__name__}:make_none"], "make_none` is `None`"),
        (["m.eqx", "--like", "wrong:f"], "`--like wrong:f`: SyntaxError: "),
        (["there.npz"], "exists already"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_mistakes_of_convert(ckpt, ask, monkeypatch, options, problem):
    monkeypatch.chdir(ckpt.parent)
    (ckpt.parent / "there.npz").write_bytes(b"mine")
    (ckpt.parent / "wrong.py").write_text("f = (")
    before = sorted(path.name for path in ckpt.parent.iterdir())
    status, text = ask("convert", "c", *options)
    assert status == 2
    assert problem in text
    assert sorted(path.name for path in ckpt.parent.iterdir()) == before
    assert (ckpt.parent / "there.npz").read_bytes() == b"mine"


def test_overwrite(ckpt, ask, monkeypatch):
    monkeypatch.chdir(ckpt.parent)
    for _ in range(2):
        assert ask("convert", "c", "m.npz", "--overwrite")[0] == 0
        assert ask("copy", "c", "d", "--overwrite")[0] == 0
    assert ask("copy", "c", "d")[0] == 2


def test_copy(tmp_path, ckpt, ask):
    options = ["--layout", "ocdbt", "--compression", "zstd"]
    assert ask("copy", ckpt, tmp_path / "d", *options)[0] == 0
    manifest = eqx_ckpt.inspect.read_manifest(tmp_path / "d")
    assert (manifest.layout, manifest.metadata) == ("ocdbt", {"n": 1})
    assert ask("diff", ckpt, tmp_path / "d", "--values") == (0, "")
    status, text = ask("copy", ckpt, tmp_path / "e", "--layout", "tar")
    assert status == 2
    assert "'tar'" in text


def test_gc(run, ask, data):
    assert ask("gc", run) == (0, "0 attempts removed, 0 B\n")
    dead, alive = dead_save(run, 4), dead_save(run, 5)
    with open(alive.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, text = ask("gc", run, "--dry-run")
        assert status == 0
        assert str(dead) in text
        assert "1 attempt would be removed, 1000 B" in text
        found = data("gc", run, "--dry-run")[1]
        assert found["orphans"] == [{"path": str(dead), "nbytes": 1000}]
        assert dead.exists()
        assert "1 attempt removed, 1000 B" in ask("gc", run)[1]
        assert not dead.exists()
        assert alive.exists()
    assert data("gc", run)[1]["orphans"] == [{"path": str(alive), "nbytes": 1000}]
    assert not alive.exists()
    assert ask("verify", run)[0] == 0


def test_gc_of_nothing(tmp_path, ask):
    assert ask("gc", tmp_path) == (0, "0 attempts removed, 0 B\n")
    dead_save(tmp_path, 4)
    assert "1 attempt removed, 1000 B" in ask("gc", tmp_path)[1]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("none", "is not a directory"),
        ("file", "is not a directory"),
        ("c", "is not a run. It is one checkpoint"),
        ("c/layers", "is not a run. It is inside of the checkpoint"),
    ],
)
def test_gc_of_what_is_no_run(ckpt, ask, path, problem):
    (ckpt.parent / "file").touch()
    status, text = ask("gc", ckpt.parent / path)
    assert status == 2
    assert problem in text
