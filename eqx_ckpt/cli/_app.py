"""The commands, their arguments, and their exit statuses."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import eqx_ckpt

from . import _checkpoint, _report, _run
from ._output import printable


app = typer.Typer(
    name="eqx-ckpt",
    help="Look at checkpoints and recordings. A path is a directory, `s3://...` or "
    "`gs://...`.",
    epilog="Exit status: 0 yes, 1 no (damaged, different, not finite), 2 trouble.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Path = Annotated[
    str, typer.Argument(metavar="CKPT", help="A checkpoint, or a recording.")
]
_Run = Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run.")]
_Prefix = Annotated[
    str, typer.Argument(metavar="[PREFIX]", help="Only what is below this name.")
]


@app.command()
def ls(
    run: _Run,
    best: Annotated[str, typer.Option(help="Mark the step that is best in this.")] = "",
    mode: Annotated[str, typer.Option(help="Whether `min` or `max` is best.")] = "min",
    json: _Json = False,
) -> None:
    """List the steps of a run.

    Example: eqx-ckpt ls runs/a --best loss
    """
    _finish(_run.ls(run, best, mode, json))


@app.command()
def tree(
    path: _Path,
    prefix: _Prefix = "",
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", min=1, help="How far down.")
    ] = None,
    json: _Json = False,
) -> None:
    """Show the leaves of a checkpoint, with shapes, dtypes and sizes.

    Example: eqx-ckpt tree runs/a/000100 model --depth 2
    """
    _finish(_checkpoint.tree(path, prefix, depth, json))


@app.command()
def show(
    path: _Path,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as 'w[0, 2:5]'.")],
    json: _Json = False,
) -> None:
    """Show the values of a leaf, or of a part of it, and their distribution.

    Example: eqx-ckpt show runs/a/000100 'model/layers/0/weight[:2]'
    """
    _finish(_checkpoint.show(path, name, json))


@app.command()
def stats(path: _Path, prefix: _Prefix = "", json: _Json = False) -> None:
    """Compute statistics of each leaf. The status is 1 if there are NaNs or infinities.

    Example: eqx-ckpt stats runs/a/000100 model
    """
    _finish(_checkpoint.stats(path, prefix, json))


@app.command()
def diff(
    a: _Path,
    b: _Path,
    values: Annotated[bool, typer.Option("--values", help="Compare the data.")] = False,
    json: _Json = False,
) -> None:
    """Compare two checkpoints. The status is 1 if they differ.

    Example: eqx-ckpt diff runs/a/000100 runs/b/000100 --values
    """
    _finish(_checkpoint.diff(a, b, values, json))


@app.command()
def verify(
    path: Annotated[str, typer.Argument(metavar="CKPT|RUN")], json: _Json = False
) -> None:
    """Compare every byte with its checksum. The status is 1 if anything is damaged.

    Example: eqx-ckpt verify runs/a
    """
    _finish(_run.verify(path, json))


@app.command()
def report(
    path: Annotated[str, typer.Argument(metavar="CKPT|RUN")],
    other: Annotated[
        str | None,
        typer.Argument(metavar="[OTHER]", help="A checkpoint to compare with."),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The page to write.")
    ] = "report.html",
    steps: Annotated[
        int, typer.Option(min=1, help="Of a run, show at most so many, evenly spread.")
    ] = 50,
) -> None:
    """Write an HTML page to look at. The status is 1 if it has something to shout.

    Example: eqx-ckpt report runs/a -o report.html
    """
    _finish(_report.report(path, other, output, steps))


@app.command()
def rm(run: _Run, steps: Annotated[list[int], typer.Argument()]) -> None:
    """Delete steps of a run. If one of them is not there, none is deleted.

    Example: eqx-ckpt rm runs/a 100 200
    """
    _finish(_run.rm(run, steps))


def _finish(status: int) -> None:
    if status:
        raise typer.Exit(status)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status. A mistake prints a line, no traceback."""
    try:
        status = app(arguments, standalone_mode=False)
        sys.stdout.flush()
        return status or 0
    except BrokenPipeError:
        # The reader of the pipe has gone; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except (eqx_ckpt.CheckpointError, OSError) as e:
        is_damage = isinstance(e, eqx_ckpt.CorruptCheckpointError)
        lines = [printable(line) for line in str(e).splitlines()]
        print("eqx-ckpt: " + "\n".join(lines), file=sys.stderr)
        return 1 if is_damage else 2
    except Exception as e:
        if not hasattr(e, "format_message"):
            raise
        print(f"eqx-ckpt: {e.format_message()}", file=sys.stderr)  # pyright: ignore
        return 2
