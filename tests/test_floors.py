"""The package's shape: imports go down only, and files and functions stay small."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parent.parent / "eqx_ckpt"
MODULES = {file.stem: file for file in sorted(PACKAGE.glob("*.py"))}

FLOORS = [
    "_assignment _background _broadcast _chunks _compression _errors _filter_spec"
    " _leaves _manifest _match _names _parse _placement _plan _preemption _processes"
    " _progress _remote _retention _sharding _skeleton _types",
    "_attempts _checkpoint _commit _keys _objects _regions _scratch _staging _store"
    " _together",
    "_deserialise _inspect _run _serialise",
    "_manager",
    "__init__",
]
# Of the floor above the words, those that speak to TensorStore.
SPEAKERS = {"_keys", "_objects", "_regions", "_scratch", "_store"}
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}


def imports(source: str) -> Iterator[str]:
    """What a file imports, wherever in the file: `.name` for a module of ours."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield f"{node.module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f".{node.module or '__init__'}"


def neighbours(module: str) -> set[str]:
    """The modules of ours that a module imports."""
    found = imports(MODULES[module].read_text())
    return {name[1:] for name in found if name.startswith(".")}


def body_lengths(source: str) -> dict[str, int]:
    """How many lines each function's body has, its docstring not counted."""
    lengths = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            last = body[-1].end_lineno if body else None
            lengths[node.name] = last - body[0].lineno + 1 if last else 0
    return lengths


def test_reading_a_source_file():
    source = '''
def f():
    """Says something."""
    from tensorstore import Batch
    import jax._src.core

    from ._names import encode
    from . import verify
'''
    expected = {"tensorstore", "tensorstore.Batch", "jax._src.core"}
    assert set(imports(source)) == expected | {"._names", ".__init__"}
    assert body_lengths(source) == {"f": 5}


def test_every_module_has_a_floor():
    assert FLOOR.keys() == MODULES.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    for other in neighbours(module):
        assert FLOOR[other] <= FLOOR[module], f"{module} imports {other}"


def test_no_circles_within_a_floor():
    sorter = graphlib.TopologicalSorter({name: neighbours(name) for name in MODULES})
    sorter.prepare()  # Raises a CycleError that shows the circle.


@pytest.mark.parametrize("module", MODULES)
def test_borders(module):
    for name in imports(MODULES[module].read_text()):
        if name.split(".")[0] == "tensorstore":
            assert module in SPEAKERS, "TensorStore is spoken to in few files only."
        if name.startswith("jax._src"):
            assert module == "_processes", "JAX's private parts change."


def test_import_leaves_tensorstore_alone():
    code = "import sys, eqx_ckpt; sys.exit('tensorstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("module", MODULES)
def test_files_are_short(module):
    assert len(MODULES[module].read_text().splitlines()) <= 400


def test_functions_are_short():
    lengths = {
        f"{module}.{function}": length
        for module, file in MODULES.items()
        for function, length in body_lengths(file.read_text()).items()
    }
    assert {name: length for name, length in lengths.items() if length > 60} == {}
    long = {name: length for name, length in lengths.items() if length > 30}
    assert len(long) <= len(lengths) / 10, long
