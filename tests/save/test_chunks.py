"""How arrays are cut, and how what is cut is put together again."""

from eqx_ckpt._format.chunks import batches


def test_a_batch_is_never_over_its_limit_unless_it_is_one_item():
    found = batches([3, 3, 5, 9, 1, 6, 2, 4], lambda nbytes: nbytes, 6)
    assert list(found) == [[3, 3], [5], [9], [1], [6], [2, 4]]
