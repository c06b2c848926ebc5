"""Files are opened in one way, so that no pipe can block and no link leads away."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parents[2] / "eqx_ckpt"
# What is new is nobody else's, and a directory never blocks.
SAFE = {"O_EXCL", "O_DIRECTORY", "O_NONBLOCK", "devnull"}


def problems(source: str) -> Iterator[str]:
    """The calls in a source that would open whatever is at a path."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, text = ast.unparse(node.func), ast.unparse(node)
        names = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        is_new = name == "open" and any(
            isinstance(a, ast.Constant) and "x" in str(a.value) for a in node.args[1:2]
        )
        first = ast.unparse(node.args[0]) if node.args else ""
        if re.match("f?'/proc/self/", first):
            continue  # What this process has opened already, or what Linux says of it.
        if (
            (name == "open" and not is_new)
            or (name == "os.open" and not SAFE & names)
            or name in ("io.open", "np.load", "np.memmap", "np.fromfile", "os.mkfifo")
            or (name == "zipfile.ZipFile" and first != "f")
            or name.endswith((".read_bytes", ".read_text"))
        ):
            yield f"{node.lineno}: {text}"


def test_files_are_opened_in_one_way() -> None:
    assert [
        f"{file}:{problem}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.name != "opening.py"
        for problem in problems(file.read_text())
        if "resources.files(" not in problem
    ] == []


@pytest.mark.parametrize(
    "call",
    [
        "open(path)",
        "open(path, 'rb')",
        "os.open(path, os.O_RDONLY)",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "zipfile.ZipFile(path)",
        "Path(path).read_bytes()",
        "path.read_text('utf-8')",
        "np.load(path)",
    ],
)
def test_another_way_would_be_found(call: str) -> None:
    assert [*problems(call)]
