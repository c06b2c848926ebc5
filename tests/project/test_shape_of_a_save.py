"""A save can be followed by a reader: its files call each other one way."""

import subprocess
import sys
from pathlib import Path

import pytest

import eqx_ckpt


pytestmark = pytest.mark.once


PACKAGE = str(Path(eqx_ckpt.__file__).parent)

# In a process of its own, in which nothing is cached yet.
PROGRAM = """
import sys
import equinox as eqx, eqx_ckpt, jax, optax

package, path = sys.argv[1:]
key = jax.random.key(0)
model = eqx.nn.MLP(2, 2, 8, 2, key=key)
opt_state = optax.adamw(1e-3).init(eqx.filter(model, eqx.is_array))
tree = {"model": model, "opt_state": opt_state, "step": 1, "key": key}

def ours(frame):
    while frame and not is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return frame

def is_ours(file):
    # A pool of threads calls what it is given, as `map` does.
    return file.startswith(package) and file != pool.__file__

def note(frame, event, _):
    code = frame.f_code
    if event == "call" and frame is ours(frame):
        caller = ours(frame.f_back)
        file = caller.f_code.co_filename if caller else ""
        calls.add((file, code.co_filename, code.co_name))

save = eqx_ckpt.tree_serialise_leaves  # It is imported here.
# Whether a disk is slow must not depend on how busy this machine is.
pool = sys.modules["eqx_ckpt._storage.calls.worker_threads"]
pool._PATIENCE = float("inf")
calls = set()
sys.setprofile(note)
save(path, tree)
sys.setprofile(None)
for call in calls:
    print(*call, sep="\t")
"""
# They are functions to the interpreter, but not to a reader.
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


@pytest.fixture(scope="module")
def entered(tmp_path_factory):
    """(caller's file, callee's file, callee) of all functions that a save enters."""
    path = tmp_path_factory.mktemp("traced") / "new"
    command = [sys.executable, "-c", PROGRAM, PACKAGE, str(path)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    calls = [tuple(line.split("\t")) for line in out.splitlines()]
    return {call for call in calls if call[2] not in COMPREHENSIONS}


def test_no_two_files_call_each_other(entered):
    pairs = {(a, b) for a, b, _ in entered if a not in ("", b)}
    assert pairs
    assert not {(a, b) for a, b in pairs if (b, a) in pairs}
