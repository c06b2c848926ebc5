import os
from collections.abc import Callable
from typing import Any, TypeAlias


PathLike: TypeAlias = str | os.PathLike[str]
KeyPath: TypeAlias = tuple[Any, ...]
IsLeaf: TypeAlias = Callable[[Any], bool] | None
TypedPath: TypeAlias = tuple[tuple[str, str | int], ...]
Spec: TypeAlias = Callable[[Any, Any], Any]
# Told of the name of a leaf, and of how many more bytes of it are done.
Report: TypeAlias = Callable[[str, int], None]
