"""What a save looks at, on a host and as on an accelerator."""

from unittest import mock

from support import Encoded, unchanged, Write


def as_on(place):
    """Take the arrays of this machine for arrays on such a device."""
    return mock.patch.object(unchanged, "is_on_host", return_value=place == "host")


PLACES = ["host", "accelerator"]


def looked_at(manager, step, tree, what):
    """The names of the leaves that a save has copied, or hashed to know them."""
    seen = set()
    pieces, content_hash = Write.pieces, Encoded.content_hash

    def copied(write):
        seen.add(write.name)
        return pieces(write)

    def hashed(encoded):
        seen.add(encoded._chunk.name)
        return content_hash(encoded)

    copies = mock.patch.object(Write, "pieces", copied)
    hashes = mock.patch.object(Encoded, "content_hash", hashed)
    with copies if what == "accelerator" else hashes:
        manager.save(step, tree).result()
    return seen
