"""Orders are uniform: frequencies against probabilities, with fixed seeds.

A statistic fails if a uniform order would be as far off once in 100,000 times. The
seeds are fixed, so a test that passes once passes always.
"""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chisquare

from eqx_ckpt.data._order import Order, Rows, rows


LEAST_P = 1e-5
SMALL = [1, 2, 3, 4, 5, 6]
LARGER = [
    *(7, 8, 10, 13, 16, 17, 31, 50, 64, 100),
    *(127, 256, 257, 500, 1000, 4096, 10_007, 65_536, 65_537, 99_991),
]

# From seeds, epochs and positions, which broadcast, to rows.
Shuffle = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]


def words(*values) -> np.ndarray:
    return np.asarray(values, np.uint32)


def shuffle(seed, epoch, position, count: int, order: Order = "shuffle") -> np.ndarray:
    return rows(order, Rows(count), seed, epoch, position).astype(np.int64)


def p_value(found: np.ndarray, probabilities: np.ndarray) -> float:
    """Of the frequencies of numbers, beside their probabilities."""
    is_possible = probabilities > 0
    counts = np.bincount(found.ravel(), minlength=probabilities.size)
    assert not counts[~is_possible].any()
    if is_possible.sum() < 2:
        return 1.0
    expected = probabilities[is_possible] * found.size
    return chisquare(counts[is_possible], expected).pvalue


def permutation_p_values(order: Shuffle, count: int, number: int) -> list[float]:
    """All permutations are equally likely: over seeds, epochs, and pairs of these."""
    at, many = np.arange(count, dtype=np.uint32), np.arange(number, dtype=np.uint32)
    all_of = [*itertools.permutations(range(count))]
    index = np.full(count**count, -1)
    digits = count ** np.arange(count)
    index[np.array(all_of) @ digits] = np.arange(len(all_of))
    found = []
    for seeds, epochs in ((many, words(0)), (words(5), many), (many % 1000, many)):
        which = index[order(seeds[:, None], epochs[:, None], at, count) @ digits]
        assert (which >= 0).all()
        found.append(p_value(which, np.full(len(all_of), 1 / len(all_of))))
        if len(all_of) <= 24:
            pairs = which[:-1:2] * len(all_of) + which[1::2]
            found.append(p_value(pairs, np.full(len(all_of) ** 2, len(all_of) ** -2.0)))
    return found


def position_p_values(
    order: Shuffle, count: int, number: int, *, with_replacement: bool = False
) -> list[float]:
    """The rows at single positions, and at pairs of positions, epochs and seeds."""
    cells = min(count, 8)
    sizes = np.bincount(np.arange(count) * cells // count)
    alone = sizes / count
    free = np.outer(alone, alone)
    apart = np.outer(sizes, sizes) - np.diag(sizes)
    distinct = free if with_replacement else apart / (count * (count - 1))
    at = words(0, 1, count // 2, count - 1)
    seeds = np.arange(number, dtype=np.uint32)[:, None]
    now, later = (
        order(seeds, words(epoch), at, count) * cells // count for epoch in (3, 4)
    )
    chains = order(seeds * 2, words(3), at, count) * cells // count
    of_epochs = order(words(9), seeds, at, count) * cells // count
    found = [p_value(x[:, i], alone) for x in (now, of_epochs) for i in range(4)]
    for i, j in ((0, 1), (0, 3), (1, 2)):
        if at[i] != at[j]:
            found.append(p_value(now[:, i] * cells + now[:, j], distinct.ravel()))
    pairs = [(now, later), (now[:-1], now[1:]), (of_epochs[:-1], of_epochs[1:])]
    # The seeds of `chains` are the even ones: each second one is new.
    pairs.append((now[1::2], chains[1::2]))
    return found + [p_value(a[:, 0] * cells + b[:, 0], free.ravel()) for a, b in pairs]


@pytest.mark.parametrize("count", SMALL)
def test_all_permutations_of_few_rows_are_equally_likely(count):
    number = 1_000_000 if count == 2 else 100_000
    assert min(permutation_p_values(shuffle, count, number)) > LEAST_P


@pytest.mark.parametrize("count", LARGER)
def test_all_rows_are_equally_likely_at_each_position(count):
    assert min(position_p_values(shuffle, count, 20_000)) > LEAST_P


@pytest.mark.parametrize("count", [1, 2, 7, 100, 65_537])
def test_independent_draws_are_uniform(count):
    def draw(*args) -> np.ndarray:
        return shuffle(*args, "independent")

    found = position_p_values(draw, count, 20_000, with_replacement=True)
    assert min(found) > LEAST_P


@pytest.mark.parametrize(("chunk", "window"), [(1, 1), (3, 1), (2, 2), (3, 8)])
def test_chunks_are_shuffled_uniformly(chunk, window):
    count = 2 * chunk
    data = Rows(count, chunk, window)
    seeds = np.arange(400_000, dtype=np.uint32)[:, None]
    found = rows("shuffle", data, seeds, words(0), words(0)).astype(np.int64)
    assert p_value(found, np.full(count, 1 / count)) > LEAST_P


def too_few_rounds(seed, epoch, position, count: int) -> np.ndarray:
    """One of two rows is first in 1/2 + 2**-7 of all seeds."""
    first = shuffle(seed, epoch, words(0), 1000) >= 500 + 1000 // 128
    return (position + first.astype(np.int64)) % count


def rotated(seed, epoch, position, count: int) -> np.ndarray:
    return (position + shuffle(seed, epoch, words(0), count)) % count


def the_same_in_all_epochs(seed, epoch, position, count: int) -> np.ndarray:
    return shuffle(seed, words(0) * epoch, position, count)


def test_bad_orders_are_found():
    assert min(permutation_p_values(too_few_rounds, 2, 1_000_000)) < LEAST_P
    for count in (3, 6):
        assert min(permutation_p_values(rotated, count, 100_000)) < LEAST_P
    for bad in (rotated, the_same_in_all_epochs):
        for count in (7, 100, 1000):
            assert min(position_p_values(bad, count, 20_000)) < LEAST_P


def test_large_permutations_look_random():
    count = 100_000
    at = np.arange(count)
    found = shuffle(words(1), words(0), at.astype(np.uint32), count)
    # Of a random permutation, each of these is within 4 standard deviations.
    assert abs(np.corrcoef(at, found)[0, 1]) < 4 / count**0.5
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 4 / count**0.5
    assert np.count_nonzero(at == found) < 6
    cells = np.bincount(at // 1000 * 100 + found // 1000, minlength=100**2)
    expected = count / 100**2
    chi2 = np.sum((cells - expected) ** 2) / expected
    assert abs(chi2 - 99**2) < 4 * (2 * 99**2) ** 0.5
