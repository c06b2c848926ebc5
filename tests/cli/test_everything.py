"""Each command on all that can be at a path: status, text and JSON as documented."""

import dataclasses
import json
import os
import re
import shutil

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt.__main__ import main

from .everything import KIND, make
from .test_json import check


pytest.importorskip("typer")
pytest.importorskip("plotly")

# What each command is called with, where `X` is the path, `O` what it may write, and
# `E` a file that is there already.
COMMANDS = {
    "ls": "ls X",
    "log": "log X",
    "ls --best": "ls X --best loss --mode max",
    "ls --mirror": "ls X --mirror O",
    "tree": "tree X",
    "tree of a part": "tree X w --depth 1",
    "tree --since": "tree X --since X",
    "tree of nothing": "tree X none",
    "show": "show X w[0]",
    "show backwards": "show X w[::-1,-1]",
    "show nothing": "show X none",
    "show outside": "show X w[0,0,0,0]",
    "stats": "stats X",
    "stats of a part": "stats X w",
    "stats of nothing": "stats X none",
    "stats --bad": "stats X --bad",
    "diff": "diff X X",
    "diff of a part": "diff X X w --values",
    "diff of nothing": "diff X X none",
    "diff --values": "diff X X --values",
    "diff with": "diff checkpoint X",
    "verify": "verify X",
    "verify --digest": f"verify X --digest {'0' * 64}",
    "digest": "digest X",
    "gc": "gc X --dry-run",
    "report": "report X -o O.html",
    "report --steps": "report X -o O/of/one.html --steps 1",
    "report with": "report checkpoint X -o O.html",
    "report over": "report X -o E --overwrite",
    "rm": "rm X 1",
    "rm some": "rm X 1 99",
    "rm nothing": "rm X -- -1",
    "sync": "sync X O",
    "fork": "fork X O",
    "copy": "copy X O",
    "copy into": "copy X O --layout ocdbt --compression zstd",
    "copy inside": "copy X checkpoint/inside",
    "copy over": "copy X E --overwrite",
    "to checkpoint": "convert X O --to checkpoint",
    "to safetensors": "convert X O.safetensors",
    "to npz": "convert X O.npz",
    "to npz over": "convert X E --to npz --overwrite",
    "to flax": "convert X O.msgpack",
    "to orbax": "convert X O --to orbax",
    "to eqx": "convert X O.eqx",
    "to eqx --like": "convert X O.eqx --like helpers:bits",
    "to what": "convert X O",
}
JSON = ("ls", "log", "tree", "show", "stats", "diff", "verify", "digest", "gc")
RUNS = ("ls", "log", "rm", "gc", "sync", "fork")
# They never succeed, whatever is there, and what is wrong is not what is there.
REFUSED = {
    "to eqx": "Pass `--like MODULE:NAME`",
    "to eqx --like": "",
    "to what": "names no format",
    "rm nothing": "-1 is not a step",
    "tree of nothing": "PREFIX is 'none'.* There is 'b', 'w'",
    "stats of nothing": "PREFIX is 'none'.* There is 'b', 'w'",
    "diff of nothing": "PREFIX is 'none'.* There is 'b', 'w'",
    "show nothing": "There is no leaf 'none'. There is 'b', 'w'",
    "show outside": "too many indices",
    "report over": "replaces only a report",
    "copy inside": "inside of the checkpoint",
    "copy over": "is a file, and a checkpoint is to be written",
    "to npz over": "replaces only an npz file",
}
UNREAD = ("to eqx", "to eqx --like", "to what", "rm nothing")
# Arguments of Python, which nobody has here.
PYTHON = re.compile(
    r"`?(overwrite|strict|layout|prefix|steps|compression|item)=|"
    r"`(like|to|where|filter_spec|prefix|strict|overwrite|steps|format|layout|item|digest)`|"
    r"eqx_ckpt\.interop|CheckpointManager|on_damage|`eqx_ckpt\.|to a function"
)
# What is said of a path that is not read, and what to do.
NAMELESS = "has no names.*`--like MODULE:NAME`"
SAID = {
    **{
        name: "inside of the recording '.*recording': pass that"
        if name.startswith("recording")
        else "holds the checkpoints '000001'.*: pass one of them"
        for name, kind in KIND.items()
        if kind == "run"
    },
    **{
        name: f"is a file of Equinox, which {NAMELESS}"
        for name in ("model.eqx", "added", "bare", "lines.eqx")
    },
    "of_eqx": "It holds '(lines|model).eqx'. It is a file of Equinox",
    "of_npz": "It holds '[01].npz'. It seems to be an archive of NumPy",
    "two_files": "has '0.safetensors', '1.safetensors': pass one of them",
    "both": "both 'both' and 'both.eqx', which is what Equinox opens",
    "array.npy": f"is an array of NumPy, which {NAMELESS}",
    "numbered": "numbers the leaves.*`--like MODULE:NAME`",
    "zero_bytes": "It is a file.* format is not known",
    "text": "It is a file.* format is not known",
    "pickle": "It is a file.* format is not known",
    "archive.zip": "It is a file.* format is not known",
    "run_file/000009": "It is a file.* format is not known",
    "empty_folder": "It is empty",
    "other_files": "It holds 'a.txt', and no checkpoint",
    "hidden/.c": "It holds 'b', and no checkpoint",
    "loop": "Too many levels of symbolic links",
    "dangling": "does not exist",
    "missing": "does not exist",
    "fifo": "cannot be read|there is no",
    "": "is not a path",
    "checkpoint/w": "inside of the checkpoint '.*checkpoint': pass that, and 'w' as",
    "checkpoint/zarr.json": "inside of the checkpoint '.*checkpoint': pass that",
    "recording/samples": "inside of the recording '.*recording': pass that",
    "items": "has the items 'model', 'optimiser': pass the path of one of them",
}


def expected(command, name):
    """The exit status, as the documentation says it."""
    kind, verb = KIND[name], command.split()[0]
    if command in REFUSED:
        # Whatever is read before that is damaged before it is anything else.
        is_ours = name in ("damaged_manifest", "cut_manifest", "cut_record")
        is_first = command in UNREAD or (command == "report over" and is_ours)
        return 1 if kind == "unreadable" and not is_first else 2
    if verb == "gc" and name in ("empty_folder", *NO_RUNS):
        return 0
    if verb in RUNS:
        if kind != "run" or command == "rm some" or (verb, name) == OF_A_RECORDING:
            return 0 if verb == "gc" and name == "hidden/.c" else 2
        if verb == "log" or (command, name) == ("ls --best", "recording/states"):
            return 2
        if verb == "sync":
            return int(name in OF_RUNS)
        return int(verb == "ls" and name in ("run_no_manifest", "run_misnamed"))
    if kind == "run":
        if command == "verify":
            return int(name in OF_RUNS)
        if command == "report" or (command, name) == ("report --steps", "run_misnamed"):
            return int(name in OF_RUNS)
        if verb == "diff" and name == "recording/states":
            # It has another leaf than the checkpoint.
            return {"diff of a part": 2, "diff with": 1}.get(command, 0)
        return 0 if verb in ("report", "diff") else 2
    if kind == "recording" or kind == "whole":
        is_other = command == "verify --digest"
        return int(is_other or (command, name) == ("diff with", "recording"))
    if kind == "damaged":
        return int(verb != "tree" and command not in ("diff", "diff with"))
    return 1 if kind == "unreadable" else 2


# In which there might be one some day.
NO_RUNS = (
    "other_files",
    "shards",
    "run_file",
    "index",
    "of_eqx",
    "of_npz",
    "two_files",
)
# Whose steps are not all whole.
OF_RUNS = ("run_damaged", "run_lost", "run_no_manifest", "run_misnamed")
OF_A_RECORDING = ("rm", "recording/states")


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
        top, _, below = name.partition("/")
        if "rm" in words and name and os.path.isdir(top):
            shutil.copytree(top, tmp_path / "copy", symlinks=True)
            name = f"{tmp_path}/copy/{below}"
        (tmp_path / "E").write_text("mine")
        place = {"X": name, "E": str(tmp_path / "E")}
        words = [
            place.get(word, re.sub(r"^O", f"{tmp_path}/out", word)) for word in words
        ]
        status = main(words)
        return status, *capsys.readouterr()

    return said


def skip_what_is_not_there(there, name):
    made = "orbax" if name in ("cut_orbax", "items", "orbax_run") else name
    if made in ("orbax", "numbered") and made not in there:
        pytest.skip("the package that writes it is not installed")


def place_of(name):
    return f"{name}.msgpack" if name == "flax" else name


def files(root):
    """All that is there, and when it was written."""
    return {path: path.lstat().st_mtime_ns for path in root.rglob("*")}


@pytest.mark.once
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KIND)
def test_each_command(places, said, tmp_path, name):
    root, there = places
    skip_what_is_not_there(there, name)
    before = files(root)
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
            if status == 2 and line.split()[0] not in RUNS:
                what = re.compile(reason(command, name), re.S)
                assert what.search(err), (what, about)
                assert "not keep" not in err, about
            if is_json and out:
                check(line.split()[0], json.loads(out, parse_constant=pytest.fail))
            assert not (is_json and status == 2 and out), about
            if status == 2:
                assert list(tmp_path.glob("out*")) == [], about
            assert (tmp_path / "E").read_text() == "mine", about
            for made in (*tmp_path.glob("out*"), *tmp_path.glob("copy")):
                shutil.rmtree(made) if made.is_dir() else made.unlink()
    assert files(root) == before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KIND)
def test_the_same_in_python(places, said, name):
    """A command says what the function says that it calls."""
    skip_what_is_not_there(places[1], name)
    place = place_of(name)
    if KIND[name] != "run":
        status, *_ = said("verify X", place)
        assert status == status_of(lambda: eqx_ckpt.inspect.verify(opened(place)))
    status, out, _ = said("tree X --json", place)
    assert status == status_of(lambda: eqx_ckpt.inspect.read_manifest(opened(place)))
    if status == 0:
        manifest = eqx_ckpt.inspect.read_manifest(opened(place))
        leaves = json.loads(out)["leaves"]
        assert [leaf["name"] for leaf in leaves] == list(manifest.leaves)
        assert [tuple(leaf["shape"]) for leaf in leaves] == [
            record.shape for record in manifest.leaves.values()
        ]
    status, out, _ = said("stats X w --json", place)
    if status == 0:
        found = eqx_ckpt.inspect.stats(opened(place), prefix="w")
        (leaf,) = json.loads(out)["leaves"]
        assert leaf == {"name": "w"} | dataclasses.asdict(found["w"])
    status, out, _ = said("show X w[0] --json", place)
    if status == 0:
        (_, _, w) = next(eqx_ckpt.inspect.iter_leaves(opened(place), prefix="w"))
        assert json.loads(out)["values"] == np.asarray(w)[0].tolist()
    status, out, _ = said("ls X --json", place)
    if status < 2:
        paths = [step["path"] for step in json.loads(out)["steps"]]
        steps = [int(path[-6:]) for path in paths if path[-7] == "/"]
        assert steps == eqx_ckpt.CheckpointManager(place).steps()


def opened(place):
    return eqx_ckpt.interop.open_source(place)


def status_of(call):
    """What the exit status is when a function is called."""
    try:
        call()
    except eqx_ckpt.CorruptCheckpointError:
        return 1
    except (eqx_ckpt.CheckpointError, OSError):
        return 2
    return 0


def reason(command, name):
    """What is wrong: with what is there, or with the command."""
    if "diff" in command and name == "recording/states":
        return "PREFIX is '(none|w)'.* There is 'step'"
    if KIND[name] == "run" and ("report" in command or "diff" in command):
        return REFUSED[command]
    if KIND[name] == "run" and command == "verify --digest":
        return "is a run, and `--digest` is of one checkpoint"
    if name in SAID and command not in UNREAD:
        return SAID[name]
    return REFUSED[command]
