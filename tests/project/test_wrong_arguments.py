"""Arguments of a wrong type: the error names the argument, or shows the value."""

import subprocess
import sys
from pathlib import Path


PROGRAM = Path(__file__).with_name("wrong_arguments.py")


def test_wrong_types_are_named(tmp_path):
    """In a process of its own, in which nobody else looks at types."""
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Without an extra, a function says so first.
    unclear = [line for line in done.stdout.splitlines() if "ImportError: " not in line]
    assert unclear == []
