"""The page: one HTML file with everything in it."""

import html
import json
import re
from importlib import resources
from typing import Any


_PACKAGE = __name__.rpartition(".")[0]
_SCRIPTS = ("basics", "treemap", "table", "leaf", "steps", "main")
# Inside of a script, these would end it, or begin a comment.
# By which a page is recognised, near its beginning.
GENERATOR = b'<meta name="generator" content="eqx-ckpt report">'
_ESCAPES = {c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page(facts: dict[str, Any], plotly: str) -> str:
    """The page about facts, drawn by the plotting library."""
    scripts = [_file(f"{name}.js") for name in _SCRIPTS]
    parts = {
        "title": html.escape(facts["title"]),
        "style": _file("style.css"),
        "facts": as_script(facts),
        "plotly": plotly,
        "script": "\n".join(scripts),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def as_script(value: Any) -> str:
    """JSON that can stand in a script, whatever names and metadata say."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda found: _ESCAPES[found[0]], text)


def _file(name: str) -> str:
    return resources.files(_PACKAGE).joinpath("assets", name).read_text("utf-8")
