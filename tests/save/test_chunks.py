"""How arrays are cut, and how what is cut is put together again."""

import pytest

from eqx_ckpt._format.chunk_grid import batches, chunk_shape


def test_a_batch_is_never_over_its_limit_unless_it_is_one_item():
    found = batches([3, 3, 5, 9, 1, 6, 2, 4], lambda nbytes: nbytes, 6)
    assert list(found) == [[3, 3], [5], [9], [1], [6], [2, 4]]


def test_a_full_batch_comes_before_the_next_item_is_asked_for():
    """Who makes the next item may wait until what is in the batch was released."""
    asked = []

    def items():
        for nbytes in (3, 3, 5):
            asked.append(nbytes)
            yield nbytes

    assert next(batches(items(), lambda nbytes: nbytes, 6)) == asked == [3, 3]


@pytest.mark.parametrize("size", [28_000_000, 28_000_012, 28_000_013])
def test_no_chunk_of_a_large_shard_crosses_its_edge(size):
    """Otherwise two processes would write one chunk, and one of them would lose."""
    (chunk,) = chunk_shape((2 * size,), (size,), 4)
    assert size % chunk == 0
    # A shard of a prime number of rows is not split: its chunks would be single rows.
    assert size < 128 * chunk
    rows, columns = chunk_shape((6, 2 * size), (3, size), 4)
    assert 3 % rows == size % columns == 0
