"""Commands on an object store: each takes a URL where it takes a directory."""

import numpy as np
import pytest
import tensorstore

import eqx_ckpt
from helpers import assert_same

from .conftest import state
from .test_writing import arrays


pytest.importorskip("typer")


@pytest.fixture
def remote(place):
    with eqx_ckpt.CheckpointManager(place.url) as manager:
        for step in (1, 2):
            manager.save(step, state(step), metadata={"loss": 1 / step})
    return place.url


def test_commands_that_read(remote, ask, data):
    one, two = f"{remote}/000001", f"{remote}/000002"
    status, found = data("ls", remote, "--best", "loss")
    assert status == 0
    assert [step["step"] for step in found["steps"]] == [1, 2]
    assert "model/w" in str(data("tree", one))
    assert "6." in ask("show", one, "model/w")[1]
    assert ask("stats", one)[0] == 0
    assert ask("diff", one, one, "--values")[0] == 0
    assert ask("diff", one, two, "--values")[0] == 1
    assert ask("verify", remote)[0] == 0
    assert ask("gc", remote, "--dry-run")[0] == 0


def test_to_a_store_and_back(remote, tmp_path, ask):
    there = f"{remote}-copy"
    assert ask("copy", f"{remote}/000002", tmp_path / "here")[0] == 0
    assert ask("copy", tmp_path / "here", there, "--compression", "zstd")[0] == 0
    assert ask("convert", there, tmp_path / "m.npz")[0] == 0
    other = f"{remote}-other"
    assert ask("convert", tmp_path / "m.npz", other, "--to", "checkpoint")[0] == 0
    assert_same(arrays(there), arrays(f"{remote}/000002"))
    assert_same(arrays(other), arrays(tmp_path / "m.npz"))


def test_a_file_of_others(place, tmp_path, ask):
    np.savez(tmp_path / "m.npz", **{"model/w": np.ones(3, np.float32)})
    url = f"{place.url}/m.npz"
    store = tensorstore.KvStore.open(place.spec).result()
    store.write("m.npz", (tmp_path / "m.npz").read_bytes()).result()
    assert "model" in ask("tree", url)[1]
    assert ask("diff", url, tmp_path / "m.npz", "--values")[0] == 0
    assert ask("convert", url, tmp_path / "again", "--to", "checkpoint")[0] == 0
    assert_same(arrays(tmp_path / "again"), arrays(tmp_path / "m.npz"))
    store.write("notes", b"Dear diary").result()
    status, text = ask("tree", f"{place.url}/notes")
    assert status == 2
    assert "`eqx-ckpt convert` takes `--format`, if it is one that" in text


def test_a_report(remote, tmp_path, ask):
    pytest.importorskip("plotly")
    assert ask("report", remote, "-o", tmp_path / "page.html")[0] == 0
    assert "model/w" in (tmp_path / "page.html").read_text()


def test_removing_a_step(remote, ask):
    assert ask("rm", remote, "1")[0] == 0
    assert ask("tree", f"{remote}/000001")[0] == 2
    assert ask("verify", remote)[0] == 0


def test_what_is_no_checkpoint_and_no_run(remote, ask):
    eqx_ckpt.tree_serialise_leaves(f"{remote}/named/a", state(1))
    for command in ("verify", "tree"):
        status, text = ask(command, f"{remote}/named")
        assert status == 2
        assert "It holds checkpoints, such as 'a': pass one of them." in text
    status, text = ask("gc", f"{remote}/000001")
    assert status == 2
    assert "It is one checkpoint, and no run" in text


def test_what_is_inside_of_something(remote, ask):
    """No part of a recording is a run, or arrays of anybody else."""
    like = {"w": np.zeros(3)}
    with eqx_ckpt.recording.Recording(f"{remote}/rec", like) as recording:
        recording.append(like)
        recording.commit({"step": 1})
    said = {
        ("tree", "rec/samples"): "inside of the recording",
        ("verify", "rec/samples"): "inside of the recording",
        ("tree", "000001/model"): "inside of the checkpoint",
        ("ls", "rec"): "It is a recording, and no run",
        ("ls", "000001/model"): "inside of the checkpoint",
        ("rm", "rec/states", "1"): "it belongs to the recording",
    }
    for (command, path, *step), problem in said.items():
        status, text = ask(command, f"{remote}/{path}", *step)
        assert (status, problem in text) == (2, True), text
    assert ask("verify", f"{remote}/rec")[0] == 0


def test_no_bucket(place, ask):
    scheme = place.url.partition(":")[0]
    status, text = ask("ls", f"{scheme}://no-such-bucket/run")
    assert status == 2
    assert "no such bucket" in text
