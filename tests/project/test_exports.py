"""What `eqx_ckpt` offers, and that all of it is documented."""

import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import eqx_ckpt
from project import interface


DOCS = Path(__file__).parents[2] / "docs/api"
NAMES = [
    ".".join(filter(None, ("eqx_ckpt", module, name)))
    for module in interface.MODULES
    for name in interface.public(module)
]
ERRORS = [name for name in dir(eqx_ckpt) if name.endswith("Error")]


def test_the_interface_is_as_reviewed():
    """`python -m tests.project.interface > tests/project/interface.txt` accepts it."""
    command = [sys.executable, "-m", "tests.project.interface"]
    root = Path(__file__).parents[2]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    assert ran.stdout == Path(__file__).with_name("interface.txt").read_text()


def test_names_are_there_before_their_first_use():
    code = "import eqx_ckpt, sys; print(*dir(eqx_ckpt)); print('jax' in sys.modules)"
    code += "; from eqx_ckpt import *; print(keep_last, data.Loader, inspect.stats)"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    listed, has_jax, _ = ran.stdout.splitlines()
    assert listed.split() == dir(eqx_ckpt)
    assert has_jax == "False"
    with pytest.raises(AttributeError, match="attribute nonsense"):
        eqx_ckpt.nonsense  # noqa: B018


def test_version():
    assert eqx_ckpt.__version__ == importlib.metadata.version("eqx-ckpt")
    assert "__version__" in dir(eqx_ckpt)


def test_each_name_is_documented_once():
    pages = [page.read_text() for page in DOCS.glob("*.md")]
    for name in NAMES:
        assert sum(f"\n::: {name}\n" in f"{page}\n" for page in pages) == 1, name
    for page in pages:
        for line in page.splitlines():
            if line.startswith("::: "):
                assert line.removeprefix("::: ") in [*NAMES, "eqx_ckpt.typing"]


def attributes_of(value: type) -> Iterator[str]:
    """Those that our classes give it, also those that only a method assigns."""
    assigned = re.compile(r"\bself\.(\w+)(?:: .+?)? = ")
    for base in value.__mro__:
        if base.__module__.startswith("eqx_ckpt."):
            yield from (*vars(base), *inspect.get_annotations(base))
            yield from assigned.findall(inspect.getsource(base))


def test_each_attribute_of_a_class_is_documented():
    for module in interface.MODULES:
        where = ".".join(filter(None, ("eqx_ckpt", module)))
        for name, value in interface.public(module).items():
            if module == "typing" or not inspect.isclass(value):
                continue
            members = interface.members(where, name, value)
            shown = {word for m in members for word in re.findall(r"^\.(\w+)", m)}
            heads = re.findall(r"^- (`.+?): ", inspect.getdoc(value) or "", re.M)
            shown |= {word for head in heads for word in re.findall(r"\w+", head)}
            found = {a for a in attributes_of(value) if a[0] != "_"}
            assert found <= shown, name


def test_help_is_enough():
    """In a clone, or with a wheel, nobody has the pages: `help` shows all of it."""
    for module in interface.MODULES:
        where = ".".join(filter(None, ("eqx_ckpt", module)))
        overview = inspect.getdoc(importlib.import_module(where)) or ""
        for name, value in interface.public(module).items():
            assert f"`{name}`" in overview, f"{where} does not name {name}"
            if module == "typing":
                continue
            assert "!!! example" in (inspect.getdoc(value) or ""), name
            if not inspect.isclass(value):
                continue
            for member, found in vars(value).items():
                if callable(found) or isinstance(found, property):
                    is_ours = member[0] != "_" and hasattr(found, "__module__")
                    assert not is_ours or inspect.getdoc(found), (name, member)


def test_restores_take_the_same_arguments():
    """Those of one restore are written out four times, for `help` and completion."""
    restore = inspect.signature(eqx_ckpt.tree_deserialise_leaves).parameters
    for function, own in (
        (eqx_ckpt.tree_match, set()),
        (eqx_ckpt.restore_or_init, {"init", "args", "missing"}),
        (eqx_ckpt.CheckpointManager.restore, {"self", "step", "on_damage"}),
    ):
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in own:
                there = restore[name]
                assert (name, parameter.default) == (name, there.default)
                assert parameter.annotation == there.annotation
    asked = {"progress", "timeout"}
    whole = [*restore][2:]
    assert [*inspect.signature(eqx_ckpt.restore_or_init).parameters][3:] == whole
    chosen = [*inspect.signature(eqx_ckpt.CheckpointManager.restore).parameters][3:-1]
    assert chosen == [name for name in whole if name not in asked]
    chosen = [*inspect.signature(eqx_ckpt.tree_match).parameters][2:]
    assert chosen == [name for name in whole if name not in asked | {"max_host_bytes"}]


def test_errors_have_one_root():
    assert len(ERRORS) == 6
    for name in ERRORS:
        assert issubclass(getattr(eqx_ckpt, name), eqx_ckpt.CheckpointError)
        assert getattr(eqx_ckpt, name).__module__ == "eqx_ckpt"
