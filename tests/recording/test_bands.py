"""Chains are a dimension: many of them share chunks, whatever each of them records."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
import zarr

import eqx_ckpt
from eqx_ckpt.recording import Recording, Samples
from eqx_ckpt.recording._writing import _sample_columns as _columns
from versions import thinned


LIKE = {
    "x": np.zeros(2, np.float32),
    "n": np.int32(0),
    "none": np.zeros((0, 2), np.float32),
}
OPTIONS = [(40, 128, None), (37, 128, "zstd"), (5, 24, None), (20, 16, None)]


def drawn(chains: int, start: int, count: int) -> dict:
    n = np.arange(start, start + count, dtype=np.int32)
    n = n + 10_000 * np.arange(chains, dtype=np.int32)[:, None]
    x = np.float32(n[..., None] + np.array([0, 0.5]))
    return {"x": x, "n": n, "none": np.zeros((chains, count, 0, 2), np.float32)}


class Chains:
    """A recording that is opened, killed and read at random, and what it must have."""

    def __init__(self, url: str, seed: int, chains: int, nbytes: int, zip: str | None):
        self.random = np.random.default_rng(seed)
        self.url, self.chains = url, chains
        self.options = {"chains": chains, "chunk_bytes": nbytes, "compression": zip}
        self.taken: list[list[int]] = [[] for _ in range(chains)]
        self.committed = [[*one] for one in self.taken]
        self.next = 0
        self.recording = Recording(url, LIKE, **self.options)

    def extend(self) -> None:
        count = int(self.random.integers(1, 30))
        block = drawn(self.chains, self.next, count)
        self.next += count
        rate = self.random.random() ** 2
        keep = {
            "all": np.ones(count, bool),
            "some": self.random.random(count) < rate,
            "each": self.random.random((self.chains, count)) < rate,
            # Others fall far behind.
            "few": np.tile(self.random.random((self.chains, 1)) < 0.1, count),
        }[self.random.choice(["all", "some", "each", "few", "few"])]
        self.recording.extend(block, keep)
        self.take(block["n"], keep)

    def take(self, n, keep) -> None:
        keep = np.broadcast_to(keep, n.shape)
        for one, new, kept in zip(self.taken, n, keep, strict=True):
            one += new[kept].tolist()

    def save(self) -> None:
        """Record from inside of a program, each chain another number of draws."""
        counts = self.random.integers(0, 12, self.chains)
        block = drawn(self.chains, self.next, 12)
        self.next += 12

        @jax.jit
        @jax.vmap
        def run(recorder, block, count):
            def step(recorder, one):
                return recorder.save(one[0], keep=one[1] < count), None

            return jax.lax.scan(step, recorder, (block, jnp.arange(12)))[0].flush()

        run(
            self.recording.recorder(block=5),
            jax.tree.map(jnp.asarray, block),
            jnp.asarray(counts),
        )
        jax.effects_barrier()
        self.take(block["n"], np.arange(12) < counts[:, None])

    def commit(self) -> None:
        self.recording.commit()
        self.committed = [[*one] for one in self.taken]
        self.check()

    def close(self) -> None:
        self.recording.close()
        self.committed = [[*one] for one in self.taken]
        self.open()

    def die(self) -> None:
        self.recording._log.abandon()
        self.open()

    def open(self) -> None:
        self.recording = Recording(self.url, LIKE, **self.options)
        self.taken = [[*one] for one in self.committed]
        self.check()

    def check(self) -> None:
        found = Samples(self.url)
        found.verify()
        for chain in self.random.choice(self.chains, 4):
            one = found.read(chain=int(chain))
            self.compare(one, self.committed[chain])
        stop = min(map(len, self.committed))
        start = int(self.random.integers(0, stop + 1))
        thin = int(self.random.integers(1, 5))
        every = found.read(start=start, stop=stop, thin=thin)
        expected = np.array([one[start:stop:thin] for one in self.committed], np.int32)
        self.compare(every, expected)

    @staticmethod
    def compare(found, n) -> None:
        n = np.array(n, np.int32)
        np.testing.assert_array_equal(found["n"], n)
        x = np.float32(n[..., None] + np.array([0, 0.5]))
        np.testing.assert_array_equal(found["x"], x)
        assert found["none"].shape == (*n.shape, 0, 2)

    def run(self, steps: int) -> None:
        kinds = ["extend"] * 6 + ["commit"] * 3 + ["close", "die"]
        for kind in self.random.choice(kinds, steps):
            getattr(self, kind)()
        self.close()


@pytest.mark.parametrize("seed", thinned(range(3), 3))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_chains_of_all_lengths(tmp_path, options, seed, monkeypatch):
    # Chains that fall behind have more chunks than fit into memory.
    monkeypatch.setattr(_columns, "_OPEN_BYTES", 0)
    Chains(str(tmp_path / "run"), seed, *options).run(16)


@pytest.mark.once
@pytest.mark.parametrize("options", OPTIONS[1:3], ids=str)
def test_chains_of_all_lengths_in_a_store(s3, options, monkeypatch):
    monkeypatch.setattr(_columns, "_OPEN_BYTES", 0)
    chains = Chains(s3.url, 1, *options)
    for kind in ("extend", "extend", "commit", "extend", "extend", "close"):
        getattr(chains, kind)()
    chains.recording.close()


def test_programs_whose_chains_differ(tmp_path):
    chains = Chains(str(tmp_path), 0, 40, 128, None)
    for kind in ("extend", "save", "commit", "save", "close"):
        getattr(chains, kind)()
    chains.recording.close()


def test_exports_of_chains_that_differ(tmp_path):
    chains = Chains(str(tmp_path / "run"), 3, 40, 128, None)
    for _ in range(4):
        chains.extend()
    chains.close()
    chains.recording.close()
    found = Samples(tmp_path / "run")
    for file, n in zip(found.to_npz(tmp_path / "out"), chains.taken, strict=True):
        chains.compare(np.load(file), n)
    source = eqx_ckpt.data.StoredDataSource(tmp_path / "run")
    every = [n for one in chains.taken for n in one]
    order = np.random.default_rng(0).permutation(len(every))
    rows = source._reader.take(order)
    np.testing.assert_array_equal(rows["n"], np.array(every)[order])


@pytest.mark.parametrize("chains", [16, 40, 1000])
def test_other_readers(tmp_path, chains):
    path = tmp_path / "run"
    with Recording(path, LIKE, chains=chains, chunk_bytes=4096) as recording:
        recording.extend(drawn(chains, 0, 50))
        recording.commit()
        keep = np.arange(chains) % 3 == 0
        recording.extend(drawn(chains, 50, 20), np.tile(keep[:, None], 20))
    n = drawn(chains, 0, 50)["n"]
    np.testing.assert_array_equal(zarr.open_group(path / "samples")["n"], n)
    spec = {"driver": "zarr3", "kvstore": f"file://{path}/samples/n"}
    np.testing.assert_array_equal(ts.open(spec).result().read().result(), n)
    eqx_ckpt.copy(path, tmp_path / "copy")
    like = {"n": n}
    copied = eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "copy", like, unexpected="ignore"
    )
    np.testing.assert_array_equal(copied["n"], n)


@pytest.mark.once
@pytest.mark.parametrize("chains", [1, 4, 16, 17, 100, 1009, 4000, 10_000])
@pytest.mark.parametrize("block_bytes", [300_000, 12_000_000])
def test_costs_follow_bytes(tmp_path, chains, block_bytes):
    like = {"theta": np.zeros(10, np.float32), "energy": np.float32(0)}
    draws = -(-block_bytes // (44 * chains))
    with Recording(tmp_path, like, chains=chains) as recording:
        for _ in range(3):
            recording.extend(
                {
                    "theta": np.ones((chains, draws, 10), np.float32),
                    "energy": np.ones((chains, draws), np.float32),
                }
            )
            recording.commit()
    nbytes = 3 * draws * chains * 44
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    padding = 5 * 2**17 if block_bytes < 2**20 else 0
    assert sum(file.stat().st_size for file in files) <= 1.1 * nbytes + padding
    assert len(files) <= 32 + 2.3 * nbytes / 2**16
    # The record has a checksum for each of them.
    assert (tmp_path / "recording.json").stat().st_size < 100_000
    assert Samples(tmp_path).read(chain=chains - 1)["energy"].sum() == 3 * draws


@pytest.mark.parametrize("uneven", [False, True])
def test_the_record_of_a_hundred_thousand_chains(tmp_path, uneven):
    keep = np.ones((100_000, 2), bool)
    keep[0, 1] = not uneven
    with Recording(tmp_path, {"n": np.int32(0)}, chains=100_000) as recording:
        recording.extend({"n": np.zeros((100_000, 2), np.int32)}, keep)
    assert (tmp_path / "recording.json").stat().st_size < (400_000 if uneven else 2000)
    assert Samples(tmp_path).read(stop=1)["n"].shape == (100_000, 1)


def test_damage_in_a_chunk_of_chains_that_differ(tmp_path):
    chains = Chains(str(tmp_path / "run"), 5, 40, 128, None)
    keep = np.zeros((40, 20), bool)
    keep[1] = keep[0, :3] = True
    chains.recording.extend(drawn(40, 0, 20), keep)
    chains.recording.close()
    for file in sorted(pathlib.Path(tmp_path / "run/samples/n").glob("c.*")):
        data = file.read_bytes()
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        with pytest.raises(
            eqx_ckpt.CorruptCheckpointError, match=f"'n': n/{file.name}"
        ):
            Samples(tmp_path / "run").verify()
        file.write_bytes(data)
    Samples(tmp_path / "run").verify()


@pytest.mark.parametrize("nbytes", [24, 128])
def test_a_killed_writer_may_have_replaced_chunks(tmp_path, nbytes):
    """The files have newer samples than the record: those are cut away."""
    options = {"chains": 40, "chunk_bytes": nbytes}
    path = tmp_path / "run"
    with Recording(path, LIKE, **options) as recording:
        recording.extend(drawn(40, 0, 5))
        recording.commit()
    record = (path / "recording.json").read_bytes()
    with Recording(path, LIKE, **options) as recording:
        recording.extend(drawn(40, 90, 3), np.arange(40)[:, None] % 3 > np.arange(3))
    (path / "recording.json").write_bytes(record)
    with Recording(path, LIKE, **options) as recording:
        recording.extend(drawn(40, 5, 2))
    found = Samples(path)
    found.verify()
    np.testing.assert_array_equal(found.read()["n"], drawn(40, 0, 7)["n"])
