"""Which arrays are known to be those of the base, before their data are looked at."""

import weakref
from collections.abc import Collection, Iterable

import jax

from .._storage.interface.base import Base
from .._tree.leaves.leaf_data import is_on_host
from .._tree.plans.write_plan import Write
from .array_fingerprint import fingerprints, has_fingerprint


def find_unchanged(
    writes: Iterable[Write], frozen: Collection[str], base: Base, new: Base
) -> list[Write]:
    """Note in `new` which arrays are those of the base, and what shows it later.

    That is, the very same object, as arrays of JAX do not change; or, of those that
    the user says are `frozen`, one with the same fingerprint. Return those of them
    that are on an accelerator. Others have no fingerprint: their hash is 20 times
    faster on the host, and is computed in the background.
    """
    arrays = [write for write in writes if isinstance(write.leaf, jax.Array)]
    for name, _, leaf, _ in arrays:
        new.arrays[name] = weakref.ref(leaf)
        known = base.arrays.get(name)
        if known is not None and known() is leaf:
            new.same.add(name)
            if name in base.fingerprints:
                new.fingerprints[name] = base.fingerprints[name]
    to_compute = {
        write.name: (write.leaf, write.record)
        for write in arrays
        if write.name in frozen
        and write.name not in new.fingerprints
        and not is_on_host(write.leaf)
        and has_fingerprint(write.leaf)
    }
    new.fingerprints.update(fingerprints(to_compute))
    for name in to_compute:
        found = new.fingerprints.get(name)
        if found is not None and found == base.fingerprints.get(name):
            new.same.add(name)
    return [w for w in arrays if w.name in new.same and not is_on_host(w.leaf)]
