"""What a leaf that is not saved looks like."""

import contextlib
import functools as ft
import hashlib
from typing import Any

from .leaves import describe_like, Skipped


def fingerprint(leaf: Any) -> str:
    """A text that identifies a leaf that is not saved, to detect when it changes."""
    if isinstance(leaf, Skipped):
        return f"skipped: {describe_like(leaf.leaf) or fingerprint(leaf.leaf)}"
    if isinstance(leaf, str | bytes):
        text = repr(leaf)
        if len(text) > 80:
            return f"{text[:60]}... sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        return text
    if isinstance(leaf, ft.partial):
        return f"functools.partial({fingerprint(leaf.func)})"
    # Builtin methods have no `__module__`, and objects may have anything there.
    for named in (leaf, type(leaf)):
        with contextlib.suppress(Exception):
            module, name = getattr(named, "__module__", None), named.__qualname__
            if type(name) is str:
                return f"{module if type(module) is str else 'builtins'}.{name}"
    return "object"
