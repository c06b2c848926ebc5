"""The page: one HTML file with everything in it."""

import contextlib
import html
import json
import re
from importlib import resources
from typing import Any

from .._errors import CheckpointError
from .._format.source import Source
from .._storage.calls.opening import reading
from .._storage.interface.output_files import NewFiles
from .._storage.interface.replacing import Kind
from .._types import check_integer, PathLike
from .page_facts import facts_of
from .versions import find_columns


_PACKAGE = __name__.rpartition(".")[0]


_SCRIPTS = ("basics", "treemap", "table", "leaf", "steps", "main")


# Near its beginning, each page has this text, by which it is recognised.
GENERATOR = b'<meta name="generator" content="eqx-ckpt report">'


# In a script, these characters could end it, or begin a comment.
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


_TRIES = 3


def write_report(
    source: PathLike | Source,
    path: PathLike,
    other: PathLike | Source | None = None,
    *,
    steps: int = 50,
    overwrite: bool = False,
) -> list[str]:
    """Write a page about a checkpoint, or a run, or what two checkpoints differ in.

    It is one HTML file that needs no network: a map of the bytes, a table of the leaves
    with their statistics and histograms, their shardings; of a run, the metrics, and
    how each leaf changed from step to step. Needs plotly:
    `pip install 'eqx-ckpt[report]'`.

    Each version is read once, chunk by chunk, and compared with its checksums, if it
    has any; how much memory that takes does not depend on the size of a leaf. What is
    damaged is listed.

    **Arguments:**

    - `source`: the directory or URL of a checkpoint, of a run, or of a
        [`eqx_ckpt.recording.Recording`][], or a [`eqx_ckpt.interop.Source`][].
    - `path`: of the page.
    - `other`: a checkpoint to compare with `source`. A run stands for its newest step.
    - `steps`: of a run, show at most so many, evenly spread, with the newest one.
    - `overwrite`: replace an older page; anything else is never replaced.

    **Returns:**

    The alerts at the top of the page, as sentences: leaves with NaNs or infinities,
    and what is damaged or cannot be read. Empty if all is well.

    **Raises:**

    - [`eqx_ckpt.CheckpointNotFoundError`][]: there is no checkpoint and no run.
    - [`eqx_ckpt.CorruptCheckpointError`][]: the manifest of a checkpoint is damaged.
    - [`eqx_ckpt.CheckpointError`][]: what is read is replaced again and again.
    - `ImportError`: plotly is not installed.
    - `ValueError`: `steps` is not a positive integer.
    - [`eqx_ckpt.CheckpointExistsError`][]: something exists at `path` that may not be
        replaced, or it is inside of a checkpoint.
    - `OSError`: the page cannot be written, or the file system fails.

    !!! example

        ```python
        import eqx_ckpt
        import jax.numpy as jnp

        tree = {"w": jnp.array([1.0, 2.0, jnp.nan]), "step": 5}
        eqx_ckpt.tree_serialise_leaves("ckpt", tree)
        alerts = eqx_ckpt.inspect.write_report("ckpt", "report.html")
        assert alerts == ["1 leaf has NaNs or infinities"]
        ```
    """
    facts = written(source, path, other, steps, overwrite)
    return [alert["text"] for alert in facts["alerts"]]


def written(
    source: PathLike | Source,
    path: PathLike,
    other: PathLike | Source | None,
    steps: int,
    overwrite: bool,
) -> dict[str, Any]:
    """Write the page; returns what it shows."""
    steps = check_integer("steps", steps, 1)
    files = NewFiles([path], _KIND, overwrite=overwrite)
    plotly = _plotly()
    with files, files.next() as f:
        replaced: list[str] = []
        for _ in range(_TRIES):
            columns = find_columns(source, other, steps)
            with contextlib.ExitStack() as stack:
                for column in columns.found:
                    stack.enter_context(column.reading)
                facts = facts_of(columns)
            replaced = [str(c) for c in columns.found if c.reading.has_changed()]
            if not replaced:
                f.write(page(facts, plotly).encode(errors="replace"))
                return facts
    raise CheckpointError(
        f"{', '.join(replaced)} was replaced or removed while it was read, "
        f"{_TRIES} times. Report a checkpoint that nobody overwrites or removes."
    )


def _differs(path: str) -> str:
    with reading(path) as f:
        return "" if GENERATOR in f.read(1024) else "It does not begin as one."


_KIND = Kind("a report of this package", _differs)


def _plotly() -> str:
    """The plotting library, as JavaScript."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as e:
        raise ImportError(
            "A report needs plotly: `pip install 'eqx-ckpt[report]'`."
        ) from e
    return get_plotlyjs()
