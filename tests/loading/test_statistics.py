"""Orders are uniform: frequencies against probabilities, with fixed seeds.

A test compares all its statistics with the probabilities of a uniform order. It fails
if the least likely of them would come by chance once in 10,000 times, multiplied by
their number (the bound of Bonferroni). The seeds are fixed, so a test that passes once
passes always. Each kind of bad order fails the same tests.
"""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import chisquare

from eqx_ckpt.data._order import Order, Rows, rows


pytestmark = pytest.mark.once


LEAST_P = 1e-4
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
    if counts[~is_possible].any():
        return 0.0
    if is_possible.sum() < 2:
        return 1.0
    expected = probabilities[is_possible] * found.size
    return chisquare(counts[is_possible], expected).pvalue


def is_uniform(p_values: list[float]) -> bool:
    return min(p_values) * len(p_values) > LEAST_P


def permutation_p_values(order: Shuffle, count: int, number: int) -> list[float]:
    """All permutations are equally likely: over seeds, epochs, and pairs of these.

    The chains of a program have adjacent seeds.
    """
    at, many = np.arange(count, dtype=np.uint32), np.arange(number, dtype=np.uint32)
    all_of = [*itertools.permutations(range(count))]
    index = np.full(count**count, -1)
    digits = count ** np.arange(count)
    index[np.array(all_of) @ digits] = np.arange(len(all_of))
    found = []
    for seeds, epochs in ((many, words(0)), (words(5), many), (many % 1000, many)):
        rows_at = order(seeds[:, None], epochs[:, None], at, count)
        which = index[rows_at @ digits]
        if (which < 0).any():
            return [0.0]
        found.append(p_value(which, np.full(len(all_of), 1 / len(all_of))))
        if len(all_of) <= 24:
            pairs = which[:-1:2] * len(all_of) + which[1::2]
            found.append(p_value(pairs, np.full(len(all_of) ** 2, len(all_of) ** -2.0)))
        for i in range(count):
            pairs = rows_at[:-1:2, i] * count + rows_at[1::2, i]
            found.append(p_value(pairs, np.full(count**2, count**-2.0)))
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
    # Keys that only depend on the sum of seed and epoch.
    pairs.append((later[:-1], now[1:]))
    return found + [p_value(a[:, 0] * cells + b[:, 0], free.ravel()) for a, b in pairs]


@pytest.mark.parametrize("count", SMALL)
def test_all_permutations_of_few_rows_are_equally_likely(count):
    number = 1_000_000 if count == 2 else 100_000
    assert is_uniform(permutation_p_values(shuffle, count, number))


@pytest.mark.parametrize("count", LARGER)
def test_all_rows_are_equally_likely_at_each_position(count):
    assert is_uniform(position_p_values(shuffle, count, 20_000))


@pytest.mark.parametrize("count", [1, 2, 7, 100, 65_537])
def test_independent_draws_are_uniform(count):
    def draw(*args) -> np.ndarray:
        return shuffle(*args, "independent")

    found = position_p_values(draw, count, 20_000, with_replacement=True)
    assert is_uniform(found)


@pytest.mark.parametrize(("chunk", "window"), [(1, 1), (3, 1), (2, 2), (3, 8)])
def test_chunks_are_shuffled_uniformly(chunk, window):
    count = 2 * chunk
    data = Rows(count, chunk, window)
    seeds = np.arange(400_000, dtype=np.uint32)[:, None]
    found = rows("shuffle", data, seeds, words(0), words(0)).astype(np.int64)
    assert p_value(found, np.full(count, 1 / count)) > LEAST_P


@pytest.mark.parametrize(
    ("count", "chunk", "window"),
    [(4, 2, 1), (5, 2, 1), (6, 2, 1), (6, 3, 1), (6, 4, 1), (5, 2, 2), (6, 2, 8)],
)
def test_all_orders_of_few_chunks_are_equally_likely(count, chunk, window):
    """All that keep the rows of a window together."""
    chunks = [range(i, min(i + chunk, count)) for i in range(0, count, chunk)]
    possible: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(chunks):
        windows = [
            [*itertools.chain(*order[i : i + window])]
            for i in range(0, len(order), window)
        ]
        equal = [*itertools.product(*map(itertools.permutations, windows))]
        for one in (tuple(itertools.chain(*rows_of)) for rows_of in equal):
            possible[one] = possible.get(one, 0) + 1 / len(equal)
    data, at = Rows(count, chunk, window), np.arange(count, dtype=np.uint32)
    seeds = np.arange(100 * len(possible), dtype=np.uint32)[:, None]
    digits = count ** np.arange(count)
    found = rows("shuffle", data, seeds, words(0), at).astype(np.int64) @ digits
    probabilities = np.zeros(count**count)
    probabilities[np.array([*possible]) @ digits] = [*possible.values()]
    assert p_value(found, probabilities / probabilities.sum()) > LEAST_P


def too_few_rounds(seed, epoch, position, count: int) -> np.ndarray:
    """One of two rows is first in 1/2 + 2**-7 of all seeds."""
    first = shuffle(seed, epoch, words(0), 1000) >= 500 + 1000 // 128
    return (position + first.astype(np.int64)) % count


def rotated(seed, epoch, position, count: int) -> np.ndarray:
    return (position + shuffle(seed, epoch, words(0), count)) % count


def even(seed, epoch, position, count: int) -> np.ndarray:
    """Of three rows, none of the orders that swap two of them."""
    return rotated(seed, epoch, position, 3)


def with_a_row_that_stays(seed, epoch, position, count: int) -> np.ndarray:
    moved = shuffle(seed, epoch, position % (count - 1), count - 1)
    return np.where(position < count - 1, moved, count - 1)


def with_replacement(seed, epoch, position, count: int) -> np.ndarray:
    return shuffle(seed, epoch, position, count, "independent")


def favouring(seed, epoch, position, count: int) -> np.ndarray:
    """The first half of the rows comes first a little more often than it should."""
    found = shuffle(seed, epoch, position, count)
    swaps = (shuffle(seed, epoch, words(7), 1000) < 40) & (found >= count // 2)
    return np.where(swaps & (position == 0), 0, found)


def the_same_in_all_epochs(seed, epoch, position, count: int) -> np.ndarray:
    return shuffle(seed, words(0) * epoch, position, count)


def the_same_for_all_seeds(seed, epoch, position, count: int) -> np.ndarray:
    return shuffle(words(0) * seed, epoch, position, count)


def the_same_for_two_chains(seed, epoch, position, count: int) -> np.ndarray:
    return shuffle(seed // 2, epoch, position, count)


def of_seed_plus_epoch(seed, epoch, position, count: int) -> np.ndarray:
    return shuffle(seed + epoch, words(0), position, count)


def reversed_in_odd_epochs(seed, epoch, position, count: int) -> np.ndarray:
    is_odd = epoch % 2 == 1
    at = np.where(is_odd, count - 1 - position, position).astype(np.uint32)
    return shuffle(seed, epoch // 2, at, count)


@pytest.mark.parametrize(
    ("bad", "counts"),
    [
        (too_few_rounds, [2]),
        (even, [3]),
        (rotated, [3, 6]),
        (with_a_row_that_stays, [3, 6]),
        (with_replacement, [2, 6]),
        (the_same_in_all_epochs, [3, 6]),
        (the_same_for_all_seeds, [3, 6]),
        (the_same_for_two_chains, [3, 6]),
        (reversed_in_odd_epochs, [3, 6]),
    ],
)
def test_bad_orders_of_few_rows_are_found(bad, counts):
    for count in counts:
        number = 1_000_000 if count == 2 else 100_000
        assert not is_uniform(permutation_p_values(bad, count, number))


@pytest.mark.parametrize(
    "bad",
    [
        rotated,
        with_a_row_that_stays,
        favouring,
        the_same_in_all_epochs,
        the_same_for_all_seeds,
        the_same_for_two_chains,
        of_seed_plus_epoch,
    ],
)
@pytest.mark.parametrize("count", [7, 100, 1000])
def test_bad_orders_of_many_rows_are_found(bad, count):
    assert not is_uniform(position_p_values(bad, count, 20_000))
