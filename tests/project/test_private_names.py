"""Tests and benchmarks use the public interface, and what is in `support`."""

import ast
import re
from collections.abc import Iterator

import pytest

from .test_layers import ROOT


pytestmark = pytest.mark.once


# What tries or measures a room by itself, and `support`.
BY_ITSELF = {
    "benchmarks/chunks.py",
    "benchmarks/incremental.py",
    "tests/interop/test_npz.py",
    "tests/interop/test_out.py",
    "tests/loading/programs.py",
    "tests/loading/test_model.py",
    "tests/loading/test_order.py",
    "tests/loading/test_sources.py",
    "tests/loading/test_statistics.py",
    "tests/manager/test_history.py",
    "tests/manager/test_upload_queue.py",
    "tests/multiprocess/test_matching.py",
    "tests/recording/test_bands.py",
    "tests/recording/test_nothing_is_lost.py",
    "tests/recording/test_recording.py",
    "tests/save/test_chunks.py",
    "tests/save/test_encoding.py",
    "tests/support.py",
}


def private(source: str) -> Iterator[str]:
    """What a file imports that has no public name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            package, *parts = name.split(".")
            if package == "eqx_ckpt" and any(re.match("_[^_]", part) for part in parts):
                yield name


def test_private_names_are_in_support():
    found = {
        str(file.relative_to(ROOT))
        for place in ("tests", "benchmarks")
        for file in (ROOT / place).rglob("*.py")
        if any(private(file.read_text()))
    }
    assert found == BY_ITSELF
