"""The values of a bucket, whatever the package makes of them."""

import os

from support import KeyValues, locate


def bucket_at(url: str | os.PathLike[str]) -> KeyValues:
    """The values below a URL."""
    place = locate(url)
    assert isinstance(place, KeyValues)
    return place
