"""What an error says to do works, as it says it: the table is `ways_out.md`."""

import subprocess
import sys
from pathlib import Path

import pytest


PROGRAM = Path(__file__).with_name("ways_out.py")


@pytest.mark.once
def test_the_ways_out_lead_out(tmp_path):
    """In a process of its own, in which nobody else looks at types."""
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
