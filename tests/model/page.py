"""The tables of docs/models.md, which are what the checker has found."""

import re
from collections.abc import Iterable
from pathlib import Path

from .bucket import Bucket
from .checker import check, Found, Model
from .directory import Directory
from .links import Links
from .meeting import Meeting
from .outcome import Outcome
from .recording import Recording
from .references import References
from .tiers import Tiers


MODELS: tuple[type[Model], ...] = (
    Directory,
    Bucket,
    Recording,
    Meeting,
    Outcome,
    Links,
    References,
    Tiers,
)
PAGE = Path(__file__).parents[2] / "docs/models.md"


def scene_row(model: type[Model], scene: str, found: Found) -> str:
    counts = f"{found.states:,} | {found.steps:,}"
    return f"| {model.name} | {model.scenes[scene]} | {counts} |"


def guard_row(model: type[Model], guard: str, found: Found) -> str:
    rule = model.guards[guard][1]
    return f"| {model.name} | {rule} | {found.problem} | {len(found.trace)} |"


def without(model: type[Model], guard: str) -> Found:
    """What the checker finds once a guard is removed."""
    return check(model(model.guards[guard][0], [guard]))


def write(name: str, rows: Iterable[str]) -> None:
    """Replace the rows of one table of the page."""
    table = "\n".join(rows)
    mark = re.compile(rf"(<!-- {name} -->\n\|.*\n\|.*\n)(?:\|.*\n)*")
    PAGE.write_text(mark.sub(lambda m: f"{m[1]}{table}\n", PAGE.read_text()))
