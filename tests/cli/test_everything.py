"""Each command on all that can be at a path: status, text and JSON as documented."""

import json
import re
import shutil

import pytest

from eqx_ckpt.__main__ import main

from .everything import make, WHOLE
from .test_json import check


pytest.importorskip("typer")
pytest.importorskip("plotly")

# What each command is called with, where `X` is the path, and `O` what it may write.
COMMANDS = {
    "ls": "ls X",
    "ls --best": "ls X --best loss",
    "tree": "tree X",
    "show": "show X w[0]",
    "stats": "stats X",
    "diff": "diff X X",
    "diff --values": "diff X X --values",
    "diff with": "diff checkpoint X",
    "verify": "verify X",
    "gc": "gc X --dry-run",
    "report": "report X -o O.html",
    "report with": "report checkpoint X -o O.html",
    "rm": "rm X 1",
    "copy": "copy X O",
    "to checkpoint": "convert X O --to checkpoint",
    "to safetensors": "convert X O.safetensors",
    "to npz": "convert X O.npz",
    "to flax": "convert X O.msgpack",
    "to orbax": "convert X O --to orbax",
    "to eqx": "convert X O.eqx",
    "to eqx --like": "convert X O.eqx --like helpers:bits",
}
JSON = ("ls", "tree", "show", "stats", "diff", "verify", "gc")
RUNS = ("ls", "ls --best", "gc", "rm")
# Arguments of Python, which nobody has here.
PYTHON = re.compile(
    r"`?(overwrite|strict|layout|prefix|steps|compression)=|"
    r"`(like|to|where|filter_spec|prefix|strict|overwrite|steps|format|layout)`|"
    r"eqx_ckpt\.interop|CheckpointManager|on_damage|`eqx_ckpt\."
)
NAMES = [
    *WHOLE,
    *("run", "run with a damaged step", "run with a damaged manifest", "eqx"),
    *("damaged chunk", "damaged manifest", "zero bytes", "text", "empty folder"),
    *("other files", "loop", "missing", "checkpoint/w", "checkpoint/zarr.json", ""),
]


def expected(command, name):
    """The exit status, as the documentation says it."""
    is_run = name.startswith("run")
    if command == "to eqx":
        return 2  # It needs `--like`.
    if command == "to eqx --like":
        return 2  # What this names does not fit anything.
    if command in RUNS:
        if command == "gc" and name in ("empty folder", "other files", "shards"):
            return 0
        if not is_run:
            return 2
        return int(command.startswith("ls") and name == "run with a damaged manifest")
    if is_run and command in ("verify", "report", "report with"):
        damaged = {"verify": "run with", "report": "run with", "report with": "never"}
        return int(name.startswith(damaged[command]))
    if name in WHOLE:
        return int((command, name) == ("diff with", "recording"))
    if name == "damaged manifest":
        return 1
    if name == "damaged chunk":
        return int(command not in ("tree", "diff", "diff with"))
    return 2


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("everything")
    return root, make(root)


@pytest.fixture
def said(places, monkeypatch, capsys, tmp_path):
    """Runs a command line on a place; its status, and what it prints where."""
    monkeypatch.chdir(places[0])

    def said(line, name):
        words = line.split()
        if "rm" in words and (places[0] / name).is_dir() and name:
            shutil.copytree(name, tmp_path / "copy")
            name = str(tmp_path / "copy")
        place = {"X": name}
        words = [
            place.get(word, re.sub(r"^O", f"{tmp_path}/out", word)) for word in words
        ]
        status = main(words)
        return status, *capsys.readouterr()

    return said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_each_command(places, said, tmp_path, name):
    root, there = places
    if name == "orbax" and name not in there:
        pytest.skip("orbax is not installed")
    before = {
        path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()
    }
    for command, line in COMMANDS.items():
        if "orbax" in command and "orbax" not in there:
            continue
        for is_json in (False, True)[: 1 + (line.split()[0] in JSON)]:
            status, out, err = said(line + " --json" * is_json, place_of(name))
            about = f"{command!r} {name!r}: {status}\n{out}{err}"
            assert status == expected(command, name), about
            assert "Traceback" not in err, about
            assert PYTHON.search(out + err) is None, about
            assert status != 2 or err.startswith("eqx-ckpt: "), about
            assert status == 0 or out or err, about
            if is_json and out:
                check(line.split()[0], json.loads(out, parse_constant=pytest.fail))
            assert not (is_json and status == 2 and out), about
            if status == 2:
                assert list(tmp_path.glob("out*")) == [], about
            for made in (*tmp_path.glob("out*"), *tmp_path.glob("copy")):
                shutil.rmtree(made) if made.is_dir() else made.unlink()
    after = {
        path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()
    }
    assert after == before


def place_of(name):
    return f"{name}.msgpack" if name == "flax" else name
