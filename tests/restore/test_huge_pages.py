"""Large arrays are restored into huge pages, where the system has them."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt


ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NBYTES = 2**24


def has_huge_pages() -> bool:
    return ENABLED.exists() and "[never]" not in ENABLED.read_text()


def huge_bytes(address: int) -> int:
    """How much of the mapping that has this address is on huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{address:x} is not mapped")


def address_of(array: jax.Array | np.ndarray) -> int:
    return np.asarray(array).__array_interface__["data"][0]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has this list of mappings")
@pytest.mark.skipif(not has_huge_pages(), reason="huge pages are switched off here")
@pytest.mark.parametrize("make", [jnp.ones, np.ones])
def test_restored_arrays_are_on_huge_pages(make, tmp_path):
    tree = {"w": make((NBYTES // 4,), np.float32)}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "ckpt", tree)
    restored = eqx_ckpt.tree_deserialise_leaves(tmp_path / "ckpt", tree)
    assert (restored["w"] == 1).all()
    assert huge_bytes(address_of(restored["w"])) >= NBYTES // 2
