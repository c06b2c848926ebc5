"""A recording stands wherever a checkpoint is read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt.__main__ import main
from eqx_ckpt.recording import Recording, Samples


LIKE = {"in": {"theta": np.zeros(3, np.float32)}, "n": np.int32(0)}


def samples(count: int, start: int = 0, chains: int = 2) -> dict:
    n = np.arange(start, start + count, dtype=np.int32)
    n = n + 100 * np.arange(chains, dtype=np.int32)[:, None]
    return {"in": {"theta": np.float32(n[..., None] + np.arange(3))}, "n": n}


@pytest.fixture
def path(tmp_path):
    """50 draws of two chains, in chunks of 4 and of 12, and a state."""
    path = tmp_path / "chain"
    kwargs = {"chains": 2, "chunk_bytes": 48, "metadata": {"eps": 0.5}}
    with Recording(path, LIKE, **kwargs) as recording:
        recording.extend(samples(50))
        recording.commit({"step": 50, "x": jnp.arange(3.0)})
    return path


@pytest.mark.parametrize("kind", ["path", "object"])
def test_reading(path, kind):
    source = path if kind == "path" else Samples(path).source
    manifest = eqx_ckpt.inspect.read_manifest(source)
    assert manifest.metadata == {"eps": 0.5}
    assert manifest.leaves["in/theta"].shape == (2, 50, 3)
    assert manifest.nbytes == 2 * 50 * 16
    like = eqx_ckpt.tree_like(source)
    assert like["n"] == jax.ShapeDtypeStruct((2, 50), np.int32)
    assert eqx_ckpt.tree_match(source, like).ok
    assert not eqx_ckpt.tree_match(source, {"n": np.zeros((2, 51), np.int32)}).ok
    found = eqx_ckpt.tree_deserialise_leaves(source, like)
    jax.tree.map(np.testing.assert_array_equal, found, samples(50))
    part = eqx_ckpt.tree_deserialise_leaves(source, like["in"], prefix="in")
    np.testing.assert_array_equal(part["theta"], samples(50)["in"]["theta"])
    eqx_ckpt.inspect.verify(source)
    found = eqx_ckpt.inspect.stats(source)
    assert (found["n"].min, found["n"].max, found["n"].count) == (0, 149, 100)
    assert [name for name, _, _ in eqx_ckpt.inspect.iter_leaves(source)] == [
        "in/theta",
        "n",
    ]
    np.testing.assert_array_equal(eqx_ckpt.load(source, "n"), samples(50)["n"])
    assert not eqx_ckpt.inspect.diff(source, path, values=True)
    mean = eqx_ckpt.average([source, path])
    assert not eqx_ckpt.inspect.diff(mean, source, values=True)


def test_a_copy_is_a_checkpoint(path, tmp_path):
    eqx_ckpt.copy(path, tmp_path / "copy", compression="zstd")
    assert eqx_ckpt.inspect.read_manifest(tmp_path / "copy").metadata == {"eps": 0.5}
    found = eqx_ckpt.tree_deserialise_leaves(tmp_path / "copy", samples(50))
    jax.tree.map(np.testing.assert_array_equal, found, samples(50))


def test_a_writer_goes_on_meanwhile(path):
    leaves = eqx_ckpt.inspect.iter_leaves(path)
    with Recording(path, LIKE, chains=2) as recording:
        recording.resume({"step": 0, "x": jnp.zeros(3)})
        next(leaves)
        source = Samples(path).source
        for start in range(50, 80, 5):
            recording.extend(samples(5, start))
            recording.commit({"step": start, "x": jnp.zeros(3)})
        _, _, n = next(leaves)
        eqx_ckpt.inspect.verify(source)
    np.testing.assert_array_equal(n, samples(50)["n"])
    assert eqx_ckpt.tree_like(source)["n"].shape == (2, 50)
    assert eqx_ckpt.tree_like(path)["n"].shape == (2, 80)


def test_draws_that_only_some_chains_have(tmp_path):
    keep = np.zeros((2, 20), bool)
    keep[0] = keep[1, :7] = True
    with Recording(tmp_path, LIKE, chains=2, chunk_bytes=48) as recording:
        recording.extend(samples(20), keep)
    assert eqx_ckpt.tree_like(tmp_path)["n"].shape == (2, 7)
    eqx_ckpt.inspect.verify(tmp_path)
    # The chunk of the first chain's last draws.
    damage(tmp_path / "samples/n/c.0.1")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="'n': n/c.0.1"):
        eqx_ckpt.inspect.verify(tmp_path)


def damage(file) -> None:
    data = bytearray(file.read_bytes())
    data[1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("key", ["in/theta/c.1.2.0", "in/theta/c.1.12.0", "n/c.0.4"])
def test_damage_is_named(path, key):
    damage(path / "samples" / key)
    name = key.rpartition("/")[0]
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=f"- '{name}': {key}"):
        eqx_ckpt.inspect.verify(path)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=f"- '{name}': {key}"):
        eqx_ckpt.inspect.stats(path)
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match=f"- '{name}'"):
        eqx_ckpt.tree_deserialise_leaves(path, eqx_ckpt.tree_like(path))


def test_a_damaged_state_is_seen(path):
    damage(path / "states/000001/x/c.0")
    with pytest.raises(eqx_ckpt.CorruptCheckpointError, match="The state of the rec"):
        eqx_ckpt.inspect.verify(path)


def test_the_command_line(path, capsys):
    pytest.importorskip("typer")

    def ask(*arguments):
        status = main([str(argument) for argument in arguments])
        return status, "".join(capsys.readouterr())

    status, printed = ask("tree", path)
    assert status == 0
    assert "theta  NumPy float32[2, 50, 3]" in printed
    status, printed = ask("show", path, "n[1, :3]")
    assert status == 0
    assert "[100 101 102]" in printed
    assert ask("stats", path)[0] == 0
    assert ask("diff", path, path, "--values")[0] == 0
    assert ask("verify", path) == (0, f"ok  {path}\n")
    damage(path / "samples/n/c.0.1")
    status, printed = ask("verify", path)
    assert status == 1
    assert "'n': n/c.0.1" in printed


def test_a_path_inside_of_it(path):
    for inside in ("samples", "samples/in/theta", "states"):
        with pytest.raises(eqx_ckpt.CheckpointNotFoundError, match="of the recording"):
            eqx_ckpt.inspect.read_manifest(path / inside)
    assert eqx_ckpt.inspect.read_manifest(path / "states/000001").leaves.keys() == {
        "step",
        "x",
    }


def test_batches_of_draws(path):
    keep = np.zeros((2, 30), bool)
    keep[1, ::3] = True
    with Recording(path, LIKE, chains=2) as recording:
        recording.resume({"step": 0, "x": jnp.zeros(3)})
        recording.extend(samples(30, 50), keep)
        recording.commit()
    source = eqx_ckpt.data.StoredDataSource(path)
    expected = [*range(50), *range(100, 150), *range(150, 180, 3)]
    whole = eqx_ckpt.data.Loader(source, batch_size=110, order="sequential")
    _, batch = whole.next(whole.start())
    assert batch["n"].tolist() == expected
    assert batch["in"]["theta"].shape == (110, 3)
    loader = eqx_ckpt.data.Loader(source, batch_size=11, order="epochs")
    cursor, seen = loader.start(seed=0), []
    for _ in range(10):
        cursor, batch = loader.next(cursor)
        seen += batch["n"].tolist()
        assert (batch["in"]["theta"][:, 1] == batch["n"] + 1).all()
    assert sorted(seen) == expected
