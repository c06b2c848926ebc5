"""The values of a bucket, whatever the package makes of them."""

import os

from eqx_ckpt._storage.bucket.keyvalue_place import KeyValues
from eqx_ckpt._storage.locate import locate


def bucket_at(url: str | os.PathLike[str]) -> KeyValues:
    """The values below a URL."""
    place = locate(url)
    assert isinstance(place, KeyValues)
    return place
