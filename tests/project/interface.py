"""Print the public interface: each name, its signature, and its documented members.

To accept a change: `python -m tests.project.interface > tests/project/interface.txt`.
"""

import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import eqx_ckpt


MODULES = ("", "inspect", "interop", "data", "recording", "typing")


def public(module: str) -> dict[str, Any]:
    """The public names of a module of `eqx_ckpt`, in order, without its modules."""
    home = getattr(eqx_ckpt, module) if module else eqx_ckpt
    found = {name: getattr(home, name) for name in dir(home) if name[0] != "_"}
    return {k: v for k, v in found.items() if not isinstance(v, types.ModuleType)}


def lines() -> Iterator[str]:
    for module in MODULES:
        where = ".".join(filter(None, ("eqx_ckpt", module)))
        yield f"# {where}"
        for name, value in public(module).items():
            if module == "typing":
                yield name
            elif inspect.isclass(value) and not issubclass(value, Exception):
                yield f"class {name}{signature(value)}"
                yield from (f"    {line}" for line in members(where, name, value))
            else:
                yield name + (signature(value) if inspect.isfunction(value) else "")
        yield ""


def members(where: str, name: str, value: type) -> Iterator[str]:
    """The members that the documentation shows, or all public functions of a class."""
    pages = (Path(__file__).parents[2] / "docs/api").glob("*.md")
    block = rf"^::: {re.escape(where)}\.{name}\n    options:\n      members:"
    pattern = re.compile(block + r"((?:\n {8}- \w+)*)", re.M)
    shown = [found for page in pages for found in pattern.findall(page.read_text())]
    names = re.findall(r"- (\w+)", shown[0]) if shown else sorted(vars(value))
    for member in names:
        found = inspect.getattr_static(value, member, None)
        if member[0] == "_":
            continue
        if inspect.isfunction(found):
            yield f".{member}{signature(found)}"
        elif isinstance(found, property | classmethod | staticmethod):
            yield f".{member}"


def signature(function: Any) -> str:
    """The parameters of a function with their defaults, without types."""
    found = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
        if parameter.name != "self"
    ]
    text = str(inspect.Signature(bare))
    return re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text)


if __name__ == "__main__":
    print("\n".join(lines()).rstrip())
