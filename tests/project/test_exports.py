"""What `eqx_ckpt` offers, and that all of it is documented."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest

import eqx_ckpt


DOCS = Path(__file__).parents[2] / "docs/api"
FUNCTIONS = [
    "copy",
    "default_deserialise_filter_spec",
    "default_serialise_filter_spec",
    "save_every_seconds",
    "save_every_steps",
    "from_state_dict",
    "keep_all",
    "keep_best",
    "keep_every",
    "keep_last",
    "leaves",
    "match",
    "orphans",
    "read_manifest",
    "record_scan",
    "restore_or_init",
    "shard_like",
    "stats",
    "sweep",
    "to_state_dict",
    "tree_deserialise_leaves",
    "tree_like",
    "tree_serialise_leaves",
    "tree_serialise_leaves_async",
    "verify",
    "write_report",
]
CLASSES = [
    "CheckpointManager",
    "Collector",
    "LeafMatch",
    "LeafRecord",
    "LeafStats",
    "Manifest",
    "Match",
    "Recorder",
    "Recording",
    "RegionRead",
    "SampleBuffer",
    "Samples",
    "Source",
    "Store",
]
DATA = [
    "ArrayDataSource",
    "Cursor",
    "Info",
    "Loader",
    "RandomAccessDataSource",
    "StoredDataSource",
]
INTEROP = [
    "convert",
    "eqx",
    "flax",
    "jax_arrays",
    "npz",
    "open_source",
    "optax_transform",
    "orbax",
    "safetensors",
    "to_eqx",
    "to_flax",
    "to_npz",
    "to_orbax",
    "to_safetensors",
]
TYPES = ["Compression", "Keep", "Layout", "Progress", "When"]
ERRORS = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CorruptCheckpointError",
    "LeafMismatchError",
    "LeafNameError",
]


def test_public_names():
    public = {
        name
        for name, value in vars(eqx_ckpt).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == {*FUNCTIONS, *CLASSES, *TYPES, *ERRORS}


def test_names_are_imported_from_where_the_type_checker_is_told():
    source = ast.parse(Path(eqx_ckpt.__file__).read_text())
    block = next(node for node in source.body if isinstance(node, ast.If))
    homes = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module
    }
    assert homes == eqx_ckpt._HOMES


def test_names_are_there_before_their_first_use():
    code = "import eqx_ckpt; print(*eqx_ckpt.__all__); print(*dir(eqx_ckpt))"
    code += "; from eqx_ckpt import *; print(keep_all, data.Loader, stats)"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    exported, listed, _ = ran.stdout.splitlines()
    modules = {"data", "interop", "recording"}
    assert {*exported.split()} == {*FUNCTIONS, *CLASSES, *TYPES, *ERRORS, *modules}
    assert {*exported.split(), "__version__"} <= {*listed.split()}
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        eqx_ckpt.nonsense  # noqa: B018


def test_public_names_of_data():
    public = {
        name
        for name, value in vars(eqx_ckpt.data).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == {*DATA}


@pytest.mark.parametrize("name", DATA)
def test_data_is_documented(name):
    assert inspect.getdoc(getattr(eqx_ckpt.data, name))
    page = (DOCS / "data.md").read_text()
    assert page.count(f"\n::: eqx_ckpt.data.{name}\n") == 1


def test_public_names_of_interop():
    public = {
        name
        for name, value in vars(eqx_ckpt.interop).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == {*INTEROP}


@pytest.mark.parametrize("name", INTEROP)
def test_interop_is_documented(name):
    assert "!!! example" in getattr(eqx_ckpt.interop, name).__doc__
    page = (DOCS / "interop.md").read_text()
    assert page.count(f"\n::: eqx_ckpt.interop.{name}\n") == 1


def test_version():
    assert eqx_ckpt.__version__ == importlib.metadata.version("eqx-ckpt")


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES, *ERRORS])
def test_documented(name):
    assert inspect.getdoc(getattr(eqx_ckpt, name))
    assert pages_with(name) == 1


def pages_with(name: str) -> int:
    """How many pages of the documentation show an object."""
    pages = [page.read_text() for page in DOCS.glob("*.md")]
    return sum(f"\n::: eqx_ckpt.{name}\n" in page for page in pages)


@pytest.mark.parametrize("name", TYPES)
def test_types_are_documented(name):
    assert pages_with(name) == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_show_an_example(name):
    assert "!!! example" in getattr(eqx_ckpt, name).__doc__


@pytest.mark.parametrize("name", ERRORS)
def test_errors_have_one_root(name):
    assert issubclass(getattr(eqx_ckpt, name), eqx_ckpt.CheckpointError)
