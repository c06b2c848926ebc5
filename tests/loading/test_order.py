"""The order of the rows: frozen numbers, permutations, the same in NumPy and jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from eqx_ckpt import data


SMALL = [1, 2, 3, 4, 5, 7, 10, 100, 257]
LARGE = [65_536, 65_537, 99_991, 100_000]


def order(count: int, name: str = "shuffle", *, seed=0, epoch=0) -> np.ndarray:
    """The numbers of all rows of an epoch, through the public loader."""
    source = data.ArrayDataSource(i=np.arange(count))
    loader = data.Loader(source, batch_size=count, order=name)
    cursor = loader.start(seed)
    cursor = data.Cursor(cursor.seed, jnp.uint32(epoch), cursor.position, cursor.block)
    return np.asarray(loader.next(cursor)[1]["i"])


def test_golden_vectors():
    # Frozen: another order is another version, which a cursor names.
    assert order(10).tolist() == [7, 8, 9, 6, 5, 2, 3, 1, 0, 4]
    assert order(10, seed=7, epoch=3).tolist() == [5, 6, 4, 3, 1, 2, 8, 7, 9, 0]
    assert order(10, "independent").tolist() == [4, 9, 4, 0, 3, 2, 9, 4, 6, 2]
    large = [79135, 51877, 21510, 5291, 15074, 43889, 69536, 27743]
    assert order(100_000)[:8].tolist() == large
    # The last of the small numbers of rows, and the first of the large ones.
    assert order(65_536)[:4].tolist() == [41297, 38138, 40498, 9230]
    assert order(65_537)[:4].tolist() == [51571, 57815, 20196, 62223]
    assert order(10, "sequential").tolist() == list(range(10))


@pytest.mark.parametrize("count", SMALL + LARGE)
def test_every_epoch_is_a_permutation(count):
    found = order(count, seed=3, epoch=1)
    assert np.array_equal(np.sort(found), np.arange(count))


@pytest.mark.parametrize("count", [3, 100, 65_537])
@pytest.mark.parametrize("name", ["shuffle", "independent", "epochs", "sequential"])
def test_numpy_and_jit_agree(count, name):
    from eqx_ckpt.data._order import Rows, rows

    name = "shuffle" if name == "epochs" else name
    words = np.uint32(5), np.uint32(2)
    at = np.arange(count, dtype=np.uint32)
    host = rows(name, Rows(count), np.asarray(words[0]), np.asarray(words[1]), at)
    device = jax.jit(lambda *args: rows(name, Rows(count), *args))(*words, at)
    assert host.dtype == device.dtype == np.uint32
    assert np.array_equal(host, device)


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 5), st.integers(0, 9))
@settings(deadline=None, max_examples=60)
def test_shuffled_chunks_are_a_permutation(count, chunk, window, seed):
    from eqx_ckpt.data._order import Rows, rows

    at = np.arange(count, dtype=np.uint32)
    made = Rows(count, chunk, window)
    found = rows("shuffle", made, np.array(seed, np.uint32), np.array(1, np.uint32), at)
    assert np.array_equal(np.sort(found), at)
    # The first window, and a part of the second: rows of few chunks.
    chunks = len(set((found[: window * chunk] // chunk).tolist()))
    assert chunks <= 2 * window


def test_golden_vectors_of_chunks():
    from eqx_ckpt.data._order import Rows, rows

    def shuffled(*of):
        words = np.array([5, 2], np.uint32)
        at = np.arange(of[0], dtype=np.uint32)
        return rows("shuffle", Rows(*of), words[0], words[1], at).tolist()

    few = [15, 19, 0, 3, 4, 16, 12, 10, 18, 13, 2, 11, 14, 1, 17, 8, 22, 21]
    assert shuffled(23, 5, 3) == [*few, 7, 20, 9, 6, 5]
    more = [2, 25, 1, 3, 26, 24, 27, 0, 18, 22, 21, 17, 20, 19, 16, 23, 14, 29, 28, 12]
    assert shuffled(30, 4, 2) == [*more, 15, 13, 8, 7, 11, 5, 4, 10, 6, 9]
    # More rounds for a window of 2,000 rows than for one of few.
    many = [4229, 2736, 4267, 2335, 773, 2288, 1560, 4845, 4236, 1977, 3229, 3283]
    assert shuffled(5000, 100, 20)[:12] == many


def test_many_shuffled_chunks_are_a_permutation():
    from eqx_ckpt.data._order import Rows, rows

    at = np.arange(200_000, dtype=np.uint32)
    word = np.array(3, np.uint32)
    found = rows("shuffle", Rows(len(at), chunk=3), word, word, at)
    assert np.array_equal(np.sort(found), at)


def test_large_permutations_look_random():
    count = 100_000
    found = order(count, seed=1).astype(np.int64)
    at = np.arange(count)
    # Of a random permutation, each of these is within 4 standard deviations.
    assert abs(np.corrcoef(at, found)[0, 1]) < 4 / count**0.5
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 4 / count**0.5
    assert np.count_nonzero(at == found) < 6
    cells = np.bincount(at // 1000 * 100 + found // 1000, minlength=100**2)
    expected = count / 100**2
    chi2 = np.sum((cells - expected) ** 2) / expected
    assert abs(chi2 - 99**2) < 4 * (2 * 99**2) ** 0.5


def test_seeds_and_epochs_share_nothing():
    later = order(100, seed=0, epoch=1)
    assert not np.array_equal(later, order(100, seed=1, epoch=0))
    assert not np.array_equal(later, order(100, seed=0, epoch=0))
    same = np.mean(order(1000, seed=0, epoch=1) == order(1000, seed=1, epoch=0))
    assert same < 0.02
