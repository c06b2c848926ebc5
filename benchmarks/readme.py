"""Draw the README's plots, and write its tables, from the tables of the documentation.

```bash
python -m benchmarks.readme
```

Run it after the tables of `docs/performance.md`, `docs/reliability.md` or
`docs/comparison.md` have changed. A test compares them with the plots and the README.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
IMAGES = ROOT / "docs/images"

# The tables of the page on performance, by their first cell.
WORKLOADS = {
    "A": "2 GiB in 16 arrays",
    "B": "training state of a transformer, 445 leaves, 1.2 GiB",
    "C": "5,000 small leaves, 42 MiB",
}
# Not libraries: what a disk can do, and files without names, metadata or checksums.
LIMITS = ("limit", "plain-files")
FAULTS = {
    "killed during a save: the checkpoint before it is lost": (
        "SIGKILL during a save: the newest acknowledged checkpoint is lost"
    ),
    "killed while it deletes a step: a listed step does not restore": (
        "SIGKILL before a deletion, as an old step is removed: a listed step does not "
        "restore"
    ),
    "power cut after a save: the save is lost": (
        "power cut after a save, ext4: this checkpoint is lost"
    ),
    "one flipped bit: restored without an error": "one flipped bit",
    "disk full during a save: the checkpoint before it is lost": (
        "disk full during a save: the checkpoint before it is lost"
    ),
    "two processes save one step: a save is lost without an error": (
        "two processes save one step: an acknowledged save is lost or mixed in silence"
    ),
}
COMPARED = (
    "finds leaves by",
    "SIGKILL during a save: loses the checkpoint before it",
    "power cut after a save (ext4): loses it",
    "restores a flipped bit",
    "reads a part only",
    "restores onto another mesh",
    "renames, stacks and splits leaves",
    "incremental saves",
)


def tables(page: str) -> Iterator[list[list[str]]]:
    """The tables of a page of the documentation, as rows of cells."""
    text = (ROOT / "docs" / page).read_text()
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in block.splitlines()
        ]
        yield [rows[0], *rows[2:]]


def restores() -> dict[str, dict[str, float]]:
    """Seconds of the first restore in a process, by workload and library."""
    found: dict[str, dict[str, float]] = {}
    for (name, *columns), *rows in tables("performance.md"):
        if name in WORKLOADS and columns[0] == "durable save, s":
            column = columns.index("first restore, s") + 1
            found[WORKLOADS[name]] = {
                row[0]: float(row[column].split()[0])
                for row in rows
                if row[0] not in LIMITS
            }
    return found


def faults() -> dict[str, dict[str, tuple[int, int] | None]]:
    """How often a fault did harm, and was tried, by fault and library."""
    head, *rows = next(t for t in tables("reliability.md") if "equinox" in t[0])
    cells = {row[0]: row[1:] for row in rows}
    return {
        label: dict(zip(head[1:], map(_harm, cells[name]), strict=True))
        for label, name in FAULTS.items()
    }


def _harm(cell: str) -> tuple[int, int] | None:
    numbers = [int(number) for number in re.findall(r"\d+", cell)]
    if not numbers:
        return None
    if "silent" in cell or "error" in cell:
        return (numbers[0] if "silent" in cell else 0), numbers[0]
    return numbers[0], numbers[1]


def fault_table() -> str:
    found = faults()
    libraries = list(next(iter(found.values())))
    lines = [["fault, and its harm", *libraries], ["---"] * (len(libraries) + 1)]
    for label, harm in found.items():
        cells = ["-" if h is None else f"{h[0]} of {h[1]}" for h in harm.values()]
        lines.append([label, *(_bold(cell) for cell in cells)])
    return _table(lines)


def _bold(cell: str) -> str:
    return cell if cell.startswith(("0 ", "-")) else f"**{cell}**"


def comparison_table() -> str:
    head, *rows = next(t for t in tables("comparison.md") if "Equinox" in t[0])
    chosen = {row[0]: row for row in rows}
    plain = [[_plain(cell) for cell in chosen[name]] for name in COMPARED]
    return _table([head, ["---"] * len(head), *plain])


def _plain(cell: str) -> str:
    """A cell without its source."""
    cell = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell)
    return re.sub(r", (measured|tested)$", "", cell)


def _table(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_tables(text: str) -> str:
    """The README, with its tables as the documentation has them now."""
    for name, table in {
        "faults": fault_table(),
        "compared": comparison_table(),
    }.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        head, rest = text.split(start)
        text = f"{head}{start}{table}{end}{rest.split(end)[1]}"
    return text


def draw() -> None:
    from matplotlib import rc_context

    settings = {
        "font.family": "sans-serif",
        "font.size": 9.5,
        "svg.fonttype": "none",
        "svg.hashsalt": "eqx_ckpt",
    }
    IMAGES.mkdir(exist_ok=True)
    for theme in ("light", "dark"):
        for name, plot, data in (
            ("restore", _draw_restores, restores()),
            ("faults", _draw_faults, faults()),
        ):
            with rc_context(settings):
                figure = plot(data, _COLOURS[theme])
                figure.savefig(
                    IMAGES / f"{name}-{theme}.svg",
                    transparent=True,
                    metadata={"Date": None, "Description": json.dumps(data)},
                )


_COLOURS = {
    "light": {
        "text": "#1f2328",
        "ours": "#0f766e",
        "others": "#9aa4af",
        "none": "#0f766e",
        "some": "#c2410c",
        "faint": "#eef1f4",
    },
    "dark": {
        "text": "#e6edf3",
        "ours": "#2dd4bf",
        "others": "#667180",
        "none": "#2dd4bf",
        "some": "#ea580c",
        "faint": "#21262d",
    },
}


def _draw_restores(data: dict[str, dict[str, float]], colours: dict[str, str]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.9), layout="constrained")
    panels = figure.subplots(
        len(data), 1, height_ratios=[len(bars) + 0.9 for bars in data.values()]
    )
    for panel, (title, bars) in zip(panels, data.items(), strict=True):
        names = list(bars)
        fill = [colours["ours" if n == "eqx_ckpt" else "others"] for n in names]
        panel.barh(names, list(bars.values()), color=fill, height=0.7)
        for y, (name, seconds) in enumerate(bars.items()):
            weight = "bold" if name == "eqx_ckpt" else "normal"
            panel.annotate(
                f"{seconds:g} s",
                (seconds, y),
                (4, 0),
                textcoords="offset points",
                va="center",
                color=colours["text"],
                weight=weight,
            )
        panel.invert_yaxis()
        panel.set_xlim(0, 1.12 * max(bars.values()))
        panel.set_xticks([])
        panel.tick_params(length=0, colors=colours["text"])
        panel.set_title(title, loc="left", color=colours["text"], fontsize=9.5)
        for side in panel.spines.values():
            side.set_visible(False)
    return figure


def _draw_faults(data: dict[str, dict[str, Any]], colours: dict[str, str]) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    libraries = list(next(iter(data.values())))
    figure = Figure(figsize=(8.4, 2.9), layout="constrained")
    axes = figure.subplots()
    for y, harm in enumerate(data.values()):
        for x, found in enumerate(harm.values()):
            done = found is not None and found[0] > 0
            tone = colours["some" if done else "none"]
            if found is None:
                tone = colours["others"]
            share = found[0] / found[1] if found else 0
            box = FancyBboxPatch(
                (x - 0.43, y - 0.36),
                0.86,
                0.72,
                boxstyle="round,pad=0,rounding_size=0.08",
                facecolor=tone if done else colours["faint"],
                alpha=0.3 + 0.4 * share if done else 1,
                linewidth=0,
            )
            axes.add_patch(box)
            axes.text(
                x,
                y,
                "–" if found is None else f"{found[0]} of {found[1]}",
                ha="center",
                va="center",
                color=colours["text"] if done else tone,
                weight="bold" if done else "normal",
            )
    axes.set_xlim(-0.5, len(libraries) - 0.5)
    axes.set_ylim(len(data) - 0.5, -0.5)
    axes.set_yticks(range(len(data)), [label.replace(": ", ":\n") for label in data])
    axes.set_xticks(range(len(libraries)), libraries)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, colors=colours["text"])
    axes.get_xticklabels()[0].set_weight("bold")
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


if __name__ == "__main__":
    draw()
    README.write_text(with_tables(README.read_text()))
