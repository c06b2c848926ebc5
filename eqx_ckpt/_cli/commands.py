"""The commands, their arguments, and their exit statuses."""

import functools as ft
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from .._steps.retention import Mode
from .._types import Format, Layout, Target
from . import (
    checkpoint_commands as _checkpoint,
    folder_commands as _folder,
    run_commands as _run,
    tree_view as _tree,
    writing_commands as _writing,
)
from .exit_status import guarded, TROUBLE
from .terminal import complain


app = typer.Typer(
    name="eqx-ckpt",
    help="Look at checkpoints and recordings. A path is a directory, `s3://...` or "
    "`gs://...`; or what safetensors, Equinox, Orbax, flax, JAX, Levanter or NumPy "
    "have saved.",
    epilog="Exit status: 0 yes, 1 no (damaged, different, not finite), 2 trouble.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


_Path = Annotated[
    str, typer.Argument(metavar="CKPT", help="A checkpoint, or a recording.")
]


_CheckpointOrRun = Annotated[
    str, typer.Argument(metavar="CKPT|RUN", help="A checkpoint, or a run.")
]


_Run = Annotated[str, typer.Argument(metavar="RUN", help="The directory of a run.")]


_Source = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint, or a file of a library.")
]


_Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the same format.")
]


_Prefix = Annotated[
    str, typer.Argument(metavar="PREFIX", help="Only what is below this name.")
]


@app.command()
def ls(
    run: Annotated[
        str, typer.Argument(metavar="RUN|FOLDER", help="A run, or a folder of runs.")
    ],
    best: Annotated[
        str | None, typer.Option(help="Mark what is best in this metric.")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Which value is best.")] = "min",
    own: Annotated[
        bool,
        typer.Option("--own", help="Show what the deletion of each step would free."),
    ] = False,
    mirror: Annotated[
        str | None,
        typer.Option(metavar="MIRROR", help="Show what is here, there, or in both."),
    ] = None,
    json: _Json = False,
) -> None:
    """List the steps of a run, or the runs in a folder.

    Example: eqx-ckpt ls runs/a --best loss
    """
    _finish(_folder.ls(run, best, mode, own, mirror, json))


@app.command()
def log(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of runs.")],
    json: _Json = False,
) -> None:
    """Show the runs in a folder as a tree: each below the one it was forked from.

    Example: eqx-ckpt log runs
    """
    _finish(_folder.log(folder, json))


@app.command()
def tree(
    path: _Path,
    prefix: _Prefix = "",
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", min=1, help="How far down.")
    ] = None,
    since: Annotated[
        str,
        typer.Option(metavar="CKPT", help="Mark what is equal to this checkpoint's."),
    ] = "",
    json: _Json = False,
) -> None:
    """Show the leaves of a checkpoint, with shapes, dtypes and sizes.

    Example: eqx-ckpt tree runs/a/000100 model --depth 2
    """
    _finish(_tree.tree(path, prefix, depth, since, json))


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
def stats(
    path: _Path,
    prefix: _Prefix = "",
    bad: Annotated[
        bool, typer.Option("--bad", help="Show what has NaNs or infinities alone.")
    ] = False,
    json: _Json = False,
) -> None:
    """Compute statistics of each leaf. The status is 1 if there are NaNs or infinities.

    Example: eqx-ckpt stats runs/a/000100 model
    """
    _finish(_checkpoint.stats(path, prefix, bad, json))


@app.command()
def diff(
    a: _CheckpointOrRun,
    b: _CheckpointOrRun,
    prefix: _Prefix = "",
    values: Annotated[bool, typer.Option("--values", help="Compare the data.")] = False,
    only_values: Annotated[
        bool,
        typer.Option(
            "--only-values",
            help="Compare the data, whether they are of JAX, NumPy or Python.",
        ),
    ] = False,
    json: _Json = False,
) -> None:
    """Compare two checkpoints. The status is 1 if they differ.

    A run stands for its newest step. With --values, what changed most is first: `norm`
    is the norm of the difference, as a share of the norm in the first checkpoint.

    Example: eqx-ckpt diff runs/a/000100 runs/a/000200 model --values
    """
    how = {"values": values or only_values, "kinds": not only_values}
    _finish(_checkpoint.diff(a, b, prefix, how, json))


@app.command()
def verify(
    path: _CheckpointOrRun,
    digest: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="What `digest` has to print for it."),
    ] = None,
    json: _Json = False,
) -> None:
    """Compare every byte with its checksum. The status is 1 if anything is damaged.

    What has no checksums, such as files of safetensors, is only read. With --digest,
    the status is also 1 if the content has another digest.

    Example: eqx-ckpt verify runs/a
    """
    _finish(_run.verify(path, digest, json))


@app.command()
def digest(path: _Path, json: _Json = False) -> None:
    """Print the digest of the content: a SHA-256 of names, types, values, metadata.

    It is the same for every layout, compression and place of the same content.

    Example: eqx-ckpt digest runs/a/000100
    """
    _finish(_checkpoint.digest(path, json))


@app.command()
def gc(
    run: _Run,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Only list what would be removed.")
    ] = False,
    json: _Json = False,
) -> None:
    """Remove what saves that died have left, and nothing of one that lives.

    In an object store, this watches for ten minutes which of them live, and
    `--dry-run` lists those that live too, without their sizes.

    Example: eqx-ckpt gc runs/a --dry-run
    """
    _finish(_run.gc(run, dry_run, json))


@app.command()
def copy(
    source: _Source,
    target: Annotated[str, typer.Argument(metavar="DST", help="A new checkpoint.")],
    layout: Annotated[Layout, typer.Option(help="Files, or a database.")] = "zarr",
    compression: Annotated[
        Literal["none", "zstd"], typer.Option(help="Of all arrays.")
    ] = "none",
    overwrite: _Overwrite = False,
) -> None:
    """Copy a checkpoint, or what another library has saved, into a new checkpoint.

    Example: eqx-ckpt copy runs/a/000100 s3://bucket/a --compression zstd
    """
    how = {
        "layout": layout,
        "compression": None if compression == "none" else compression,
    }
    _finish(_writing.copy(source, target, how | {"overwrite": overwrite}))


@app.command()
def sync(
    run: _Run,
    mirror: Annotated[
        str, typer.Argument(metavar="MIRROR", help="A second place for the run.")
    ],
) -> None:
    """Upload all steps of a run that a mirror has not, the newest one first.

    The status is 1 if a step is damaged, and was not uploaded.

    Example: eqx-ckpt sync runs/a s3://bucket/a
    """
    _finish(_writing.sync(run, mirror))


@app.command()
def fork(
    run: _Run,
    new: Annotated[str, typer.Argument(metavar="NEW", help="Where a run begins.")],
    step: Annotated[
        int | None, typer.Option(help="With which step; without it, the newest.")
    ] = None,
) -> None:
    """Begin a new run with a step of another one: on one disk, by links.

    Example: eqx-ckpt fork runs/a runs/b --step 100
    """
    _finish(_writing.fork(run, new, step))


@app.command()
def convert(
    source: _Source,
    target: Annotated[str, typer.Argument(metavar="DST", help="What to write.")],
    to: Annotated[
        Target | None,
        typer.Option(help="The format; without it, the suffix of DST decides."),
    ] = None,
    format: Annotated[
        Format | None,
        typer.Option(help="That of SRC; without it, its files decide."),
    ] = None,
    like: Annotated[
        str,
        typer.Option(
            metavar="MODULE:NAME",
            help="The model, or a function that makes it, of the header of SRC if it "
            "takes one; files of Equinox need it.",
        ),
    ] = "",
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if the format does not keep all.")
    ] = False,
    overwrite: _Overwrite = False,
) -> None:
    """Write a checkpoint in another format, or the other way round.

    Example: eqx-ckpt convert runs/a/000100 model.safetensors

    Example: eqx-ckpt convert model.eqx ckpt --to checkpoint --like my_code:make_model
    """
    how = {"to": to, "format": format, "strict": strict, "overwrite": overwrite}
    _finish(_writing.convert(source, target, like, how))


@app.command()
def report(
    path: _CheckpointOrRun,
    other: Annotated[
        str | None,
        typer.Argument(metavar="OTHER", help="A checkpoint to compare with."),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The page to write.")
    ] = "report.html",
    steps: Annotated[
        int, typer.Option(min=1, help="Of a run, show at most so many, evenly spread.")
    ] = 50,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an older page.")
    ] = False,
) -> None:
    """Write an HTML page to look at. The status is 1 if the page shows an alert.

    Example: eqx-ckpt report runs/a -o report.html
    """
    how = {"steps": steps, "overwrite": overwrite}
    _finish(_writing.report(path, other, output, how))


@app.command()
def rm(
    run: _Run,
    steps: Annotated[list[int], typer.Argument(metavar="STEP", help="Their numbers.")],
) -> None:
    """Delete steps of a run. If one of them is not there, none is deleted.

    Example: eqx-ckpt rm runs/a 100 200
    """
    _finish(_run.rm(run, steps))


def _finish(status: int) -> None:
    if status:
        raise typer.Exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run a command; returns its exit status."""
    return guarded(lambda: _run_app(arguments))


@ft.cache
def _command() -> Any:
    """The parser of the commands, which typer makes anew at each call of `app`."""
    return typer.main.get_command(app)


def _run_app(arguments: Sequence[str]) -> int:
    try:
        return _command()(arguments, standalone_mode=False) or 0
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as e:
        # What the parser of typer raises, which is of other packages in other versions.
        if not hasattr(e, "format_message"):
            raise
        context: Any = getattr(e, "ctx", None)
        command = context.command_path if context else "eqx-ckpt"
        # Empty without arguments: the help was printed.
        if message := e.format_message():  # pyright: ignore
            complain(f"{message.removesuffix('.')}. Try `{command} --help`.")
        return TROUBLE
