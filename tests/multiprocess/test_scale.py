"""What the processes of a job say to each other, as there are more of them."""

import pytest

from benchmarks.scale import saves


pytestmark = pytest.mark.once


SIZES = (4, 12, 36)


@pytest.fixture(scope="module")
def said():
    """By the number of processes, what each of them has said in the second save."""
    return {
        size: [after.since(before) for before, after in saves(size)[0]]
        for size in SIZES
    }


def test_a_process_says_as_much_in_a_large_job(said):
    """Of all but the first one; an index has more digits in a large job."""
    few, *more = (max(said[size][1:]) for size in SIZES)
    for most in more:
        assert most.requests == few.requests
        assert most.sent <= few.sent + 50
        assert most.received <= few.received + 50


def test_the_first_process_says_more_for_each_other_one(said):
    few, more, many = (said[size][0] for size in SIZES)
    for each in ("requests", "sent", "received"):
        a, b, c = (getattr(of, each) for of in (few, more, many))
        # By so much for each: as SIZES are 8 and 24 apart.
        assert 0 <= c - b <= 3.5 * (b - a)
        assert b - a < 8 * 1000
