"""Every kind and dtype of leaf into every kind of `like`."""

import pytest

from .check import assert_none, differences
from .likes import LIKES, made
from .ways import DIRECT


@pytest.mark.parametrize("casting", ["no", "safe", "same_kind", "unsafe"])
def test_every_kind(every_source, every, casting):
    assert_none(
        {
            name: differences(every_source, every, made(name, every), DIRECT, casting)
            for name in LIKES
        }
    )
