"""The package's shape: imports go down only, and files and functions stay small."""

import ast
import functools as ft
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import pytest

import eqx_ckpt


pytestmark = pytest.mark.once


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "eqx_ckpt"
MODULES = {
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts): file
    for file in sorted(PACKAGE.rglob("*.py"))
}

# The rooms, from the lowest to the highest; those of one line do not import each other.
LAYERS = [
    "_errors _types _lazy",
    "_format",
    "_storage.calls",
    "_storage.interface",
    "_storage.chunks",
    "_storage.directory _storage.bucket",
    "_storage.locate",
    "_sources",
    "_tree.leaves",
    "_tree.matching",
    "_tree.transform",
    "_tree.plans",
    "_distributed",
    "_progress",
    "_inspecting",
    "_saving _restoring",
    "_steps",
    "_mirroring",
    "_run",
    "_report",
    "data interop._readers recording._writing",
    "interop._writers recording",
    "interop inspect typing",
    "__init__",
    "_cli",
    "__main__",
]
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names.split()}
# What only holds rooms.
HALLS = {"_storage", "_tree"}


def room(module: str) -> str:
    """The innermost room that a module is in, or the module itself at the top."""
    name = module.removesuffix(".__init__")
    while name not in LAYER and name not in HALLS:
        name, dot, _ = name.rpartition(".")
        assert dot, f"{module} is in no room"
    return name


@ft.cache
def parsed(source: str) -> ast.Module:
    """Each file is looked at by many tests."""
    return ast.parse(source)


def imports(source: str, module: str = "__init__") -> Iterator[str]:
    """What a file imports, wherever in the file: `.a.b` for a module of ours."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield f"{node.module}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level]
            yield from _imported(
                ".".join([*parents, *(node.module or "").split()]), node
            )


def _imported(source: str, node: ast.ImportFrom) -> Iterator[str]:
    """The modules of ours in `from source import ...`: it, or those that it names."""
    for alias in node.names:
        inside = f"{source}.{alias.name}".strip(".")
        places = (inside, f"{inside}.__init__", source, f"{source}.__init__".strip("."))
        yield "." + next(place for place in places if place in MODULES)


def neighbours(module: str) -> set[str]:
    """The modules of ours that a module imports."""
    found = imports(MODULES[module].read_text(), module)
    return {name[1:] for name in found if name.startswith(".")}


def body_lengths(source: str) -> dict[str, int]:
    """How many lines the body of each function has, by its qualified name."""
    lengths: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                body = child.body[1:] if ast.get_docstring(child) else child.body
                last = body[-1].end_lineno if body else None
                length = last - body[0].lineno + 1 if last else 0
                lengths[name] = max(length, lengths.get(name, 0))
            is_scope = isinstance(
                child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            )
            visit(child, f"{name}." if is_scope else prefix)

    visit(parsed(source), "")
    return lengths


def test_reading_a_source_file():
    source = '''
def f():
    """Says something."""
    from tensorstore import Batch
    import jax._src.core

    from .leaf_names import encode
    from .._errors import CheckpointError
    from .. import verify, _types
    from .._storage import locate
    from . import chunk_grid, FORMAT

class A:
    def f(self):
        pass

    def f(self): return 1
'''
    expected = {"tensorstore", "tensorstore.Batch", "jax._src.core"}
    ours = {
        "._format.leaf_names",
        "._errors",
        ".__init__",
        "._types",
        "._storage.locate",
    }
    ours |= {"._format.chunk_grid", "._format.__init__"}
    assert set(imports(source, "_format.manifest")) == expected | ours
    assert body_lengths(source) == {"f": 8, "A.f": 1}


def test_every_room_has_modules():
    assert LAYER.keys() | HALLS == {room(module) for module in MODULES}


def test_rooms_are_small_and_files_have_names_of_their_own():
    files = [name for name in MODULES if not name.endswith("__init__")]
    counts = Counter(name.rpartition(".")[0] for name in files)
    assert {name: count for name, count in counts.items() if count > 12} == {}
    names = Counter(name.rpartition(".")[2].lstrip("_") for name in files)
    assert [name for name, count in names.items() if count > 1] == []


def test_imports_go_down():
    assert [
        f"{module} imports {other}"
        for module in MODULES
        for other in neighbours(module)
        if room(other) != room(module) and LAYER[room(other)] >= LAYER[room(module)]
    ] == []


def test_no_circles_within_a_folder():
    sorter = graphlib.TopologicalSorter({name: neighbours(name) for name in MODULES})
    sorter.prepare()  # Raises a CycleError that shows the circle.


def test_every_module_says_what_it_is_for():
    for module, file in MODULES.items():
        assert ast.get_docstring(parsed(file.read_text())), module


def test_the_docs_show_the_layers():
    text = (ROOT / "docs/design.md").read_text()
    rows = re.findall(r"^\| \d+ \| ([^|]*) \| ([^|]*) \|$", text, re.M)
    shown = [" ".join(re.findall(r"`([\w.]+)`", names)) for names, _ in rows]
    assert shown == LAYERS[::-1]
    for names, words in rows:
        for name in re.findall(r"`([\w.]+)`", names):
            if f"{name}.__init__" in MODULES:
                file = MODULES[f"{name}.__init__"]
                said = ast.get_docstring(parsed(file.read_text())) or ""
                assert said.splitlines()[0].rstrip(".") in words, name


def test_borders():
    for module, file in MODULES.items():
        source = file.read_text()
        is_private = module == "_distributed.jax_service"
        assert is_private or not re.search(r"\bjax\._src\b", source), "It is JAX's own."
        for name in imports(source, module):
            if name.split(".")[0] == "tensorstore":
                assert room(module).startswith(("_storage", "_sources")), module
            if name.startswith("jax._src"):
                assert is_private, "JAX's private parts change."


def loaded_by(code: str, *arguments: object) -> set[str]:
    """Which of the large packages a program imports, in a process of its own."""
    large = "{'jax', 'jaxlib', 'equinox', 'tensorstore', 'numpy', 'rich'}"
    code = f"import sys\n{code}\nprint(*{large} & {{*sys.modules}}, file=sys.stderr)"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return {*ran.stderr.split()}


def test_import_imports_nothing():
    assert loaded_by("import eqx_ckpt") == set()
    assert loaded_by("import jax") >= {"jax", "jaxlib"}


@pytest.mark.parametrize("command", ["ls", "tree"])
def test_looking_imports_no_large_package(command, tmp_path):
    tree = {"w": jnp.ones((2, 3), jnp.bfloat16), "key": jax.random.key(0), "step": 5}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "000001", tree, metadata={"loss": 0.5})
    where = tmp_path if command == "ls" else tmp_path / "000001"
    code = "from eqx_ckpt.__main__ import main\nassert main(sys.argv[1:]) == 0"
    assert loaded_by(code, command, where) == set()


def statements(source: str) -> int:
    """How many statements a module has, without imports and docstrings."""

    def counts(node: ast.AST) -> bool:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        return isinstance(node, ast.stmt) and not is_text and not is_import

    return sum(map(counts, ast.walk(parsed(source))))


def test_files_are_short():
    counts = {name: statements(file.read_text()) for name, file in MODULES.items()}
    assert {name: count for name, count in counts.items() if count > 250} == {}


def test_functions_are_short():
    lengths = {
        f"{module}.{function}": length
        for module, file in MODULES.items()
        for function, length in body_lengths(file.read_text()).items()
    }
    assert {name: length for name, length in lengths.items() if length > 60} == {}
    long = {name: length for name, length in lengths.items() if length > 30}
    assert len(long) <= len(lengths) / 10, long


def functions(source: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function and method, by its qualified name."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = f"{prefix}{getattr(child, 'name', '')}"
            if isinstance(child, ast.FunctionDef):
                yield name, child
            is_scope = isinstance(child, ast.FunctionDef | ast.ClassDef)
            yield from visit(child, f"{name}." if is_scope else prefix)

    return visit(parsed(source), "")


def is_public(module: str, function: str) -> bool:
    """Whether users call it: then its arguments are what they need."""
    owner, _, method = function.partition(".")
    places = [eqx_ckpt, getattr(eqx_ckpt, module.partition(".")[0], None)]
    found = [getattr(place, owner, None) for place in places]
    home = f"eqx_ckpt.{module}".removesuffix(".__init__")
    is_shown = any(getattr(obj, "__module__", "") == home for obj in found)
    return is_shown and (method == "__init__" or not method.startswith("_"))


def test_argument_lists_are_short():
    """An internal function takes six arguments at most, and a command any options."""
    counts = {}
    for module, file in MODULES.items():
        for name, node in functions(file.read_text()):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [arg.arg for arg in every if arg.arg not in ("self", "cls")]
            if not is_public(module, name) and module != "_cli.commands":
                counts[f"{module}.{name}"] = len(names)
    assert len(counts) > 500
    assert {name for name, count in counts.items() if count > 6} == set()


def dropped_integers(source: str) -> list[str]:
    """Checks of integers whose result, that of Python, nobody takes."""
    calls = (node.value for node in ast.walk(parsed(source)) if type(node) is ast.Expr)
    checks = (call for call in map(ast.unparse, calls) if "_integer(" in call)
    return [call for call in checks if call.startswith("check_")]


def test_integers_of_numpy_become_those_of_python():
    """They would be traced by `filter_jit`, and JSON has none of them."""
    assert dropped_integers("check_integer('n', n)") == ["check_integer('n', n)"]
    sources = {name: file.read_text() for name, file in MODULES.items()}
    found = {name: dropped_integers(source) for name, source in sources.items()}
    assert {name: calls for name, calls in found.items() if calls} == {}


def backend_comparisons(source: str) -> list[str]:
    """The comparisons with the name of a backend or of a layout."""
    backends = {
        *get_args(eqx_ckpt.typing.Layout),
        "driver",
        "file",
        "memory",
        "s3",
        "gcs",
    }
    return [
        ast.unparse(node)
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Compare)
        if backends & {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    ]


def test_finding_comparisons_of_backends():
    source = """
if spec["driver"] != name or layout == "zarr":
    pass
if manifest.layout in ("zarr", "ocdbt"):
    match = kind == "memory"
if name == "numpy" or layout in LAYOUTS:
    pass
"""
    assert len(backend_comparisons(source)) == 4


def test_nobody_asks_which_backend_it_is():
    """`locate` finds the storage; its methods differ, and their callers do not."""
    found = {
        module: comparisons
        for module, file in MODULES.items()
        if (comparisons := backend_comparisons(file.read_text()))
    }
    assert all(module.startswith(("_storage.", "_sources.")) for module in found), found
    assert len(sum(found.values(), [])) <= 3, found
