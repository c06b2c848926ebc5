"""Commands about a run in two places."""

import shutil

import pytest

import eqx_ckpt

from .conftest import state
from .test_json import check


pytest.importorskip("typer")


@pytest.fixture
def there(run):
    return run.parent / "there"


def places_of(found):
    return {entry["step"]: entry["places"] for entry in found["steps"]}


def test_sync(run, there, ask):
    status, text = ask("sync", run, there)
    paths = [str(there / f"00000{step}") for step in (3, 2, 1)]
    assert (status, text.splitlines()) == (0, [f"uploaded {path}" for path in paths])
    assert ask("sync", run, there) == (0, "")
    assert ask("verify", there)[0] == 0
    shutil.rmtree(there)
    (run / "000002/model/w/c.0.0").write_bytes(b"\1" * 28)
    status, text = ask("sync", run, there)
    assert status == 1
    assert "000002' cannot be uploaded" in text
    assert eqx_ckpt.CheckpointManager(there).steps() == [1, 3]


def test_sync_of_wrong_places(run, there, ask):
    status, text = ask("sync", run, run)
    assert status == 2
    assert "MIRROR is" in text
    with eqx_ckpt.CheckpointManager(there) as other:
        other.save(4, state(4))
    status, text = ask("sync", run, there)
    assert status == 2
    assert "or pass another MIRROR" in text


def test_ls(run, there, ask, data):
    assert set(places_of(data("ls", run)[1]).values()) == {None}
    eqx_ckpt.sync(run, there)
    eqx_ckpt.CheckpointManager(run).delete(1)
    eqx_ckpt.CheckpointManager(there).delete(3)
    status, found = data("ls", run, "--mirror", there, "--own")
    assert status == 0
    check("ls", found)
    here, away = str(run), str(there)
    assert places_of(found) == {1: [away], 2: [here, away], 3: [here]}
    assert [entry["own_nbytes"] is None for entry in found["steps"]] == [1, 0, 0]
    status, text = ask("ls", run, "--mirror", there, "--best", "loss")
    assert status == 0
    head, *rows = [line.split() for line in text.splitlines()]
    assert head == ["step", "age", "size", "leaves", "where"]
    assert [where for row in rows for where in row if where in WHERE] == WHERE
    assert "[best]" in rows[1]
    shutil.rmtree(run)
    assert ask("ls", run)[0] == 2
    status, found = data("ls", run, "--mirror", there)
    assert (status, places_of(found)) == (0, {1: [away], 2: [away]})


WHERE = ["mirror", "both", "run"]


def test_ls_of_different_steps_of_one_number(run, there, ask, data):
    with eqx_ckpt.CheckpointManager(there) as other:
        other.save(2, state(2))
    status, found = data("ls", run, "--mirror", there)
    assert status == 1
    _, second, _ = found["steps"]
    assert "is not step 2 in" in second["problem"]
    (there / "000002/zarr.json").write_bytes(b"damaged")
    status, found = data("ls", run, "--mirror", there)
    assert status == 1
    assert str(there) in found["steps"][1]["problem"]
    assert ask("ls", run)[0] == 0
    assert ask("ls", run, "--mirror", run)[0] == 2
