"""What a writer replaces: its own kind, if it is told to, and nothing else, ever."""

import functools as ft
import importlib.util
import os
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import interop
from eqx_ckpt.__main__ import main
from eqx_ckpt.recording import Recording, Samples


pytestmark = pytest.mark.filterwarnings("ignore:.* does not keep")
TREE = {"a": jnp.arange(3.0), "b": {"c": jnp.ones((2, 2))}}
HAS_ORBAX = importlib.util.find_spec("orbax") is not None


class Writer(NamedTuple):
    """A function of source, target and options, and the kind that it writes."""

    write: Callable[..., Any]
    kind: str
    is_folder: bool = False
    package: str = ""


def in_background(source: str, path: str, **options: Any) -> None:
    eqx_ckpt.tree_serialise_leaves_async(path, TREE, **options).result()


def command(name: str, *arguments: str) -> Callable[..., None]:
    def ask(source: str, path: str, overwrite: bool = False) -> None:
        before = ["report", source, "-o", path] if name == "report" else []
        words = before or [name, source, path, *arguments]
        status = main([*words, *(["--overwrite"] if overwrite else [])])
        if status:
            raise eqx_ckpt.CheckpointError(f"status {status}")

    return ask


def convert(to: Any) -> Callable[..., None]:
    return ft.partial(interop.convert, to=to, like=TREE)


WRITERS = {
    "save": Writer(
        lambda source, path, **how: eqx_ckpt.tree_serialise_leaves(path, TREE, **how),
        "checkpoint",
        True,
    ),
    "in the background": Writer(in_background, "checkpoint", True),
    "copy": Writer(eqx_ckpt.copy, "checkpoint", True),
    "orbax": Writer(interop.to_orbax, "orbax", True, "orbax"),
    "safetensors": Writer(interop.to_safetensors, "safetensors"),
    "npz": Writer(interop.to_npz, "npz"),
    "eqx": Writer(
        lambda source, path, **how: interop.to_eqx(source, path, TREE, **how), "eqx"
    ),
    "flax": Writer(interop.to_flax, "flax"),
    "report": Writer(eqx_ckpt.inspect.write_report, "report", False, "plotly"),
    "hdf5": Writer(
        lambda source, path, **how: Samples("../recording.x").to_hdf5(path, **how),
        "hdf5",
        False,
        "h5py",
    ),
    "convert to a checkpoint": Writer(convert("checkpoint"), "checkpoint", True),
    "convert to orbax": Writer(convert("orbax"), "orbax", True, "orbax"),
    "convert to safetensors": Writer(convert("safetensors"), "safetensors"),
    "convert to npz": Writer(convert("npz"), "npz"),
    "convert to eqx": Writer(convert("eqx"), "eqx"),
    "convert to flax": Writer(convert("flax"), "flax"),
    "eqx-ckpt copy": Writer(command("copy"), "checkpoint", True, "typer"),
    "eqx-ckpt convert": Writer(
        command("convert", "--to", "safetensors"), "safetensors", False, "typer"
    ),
    "eqx-ckpt convert --to orbax": Writer(
        command("convert", "--to", "orbax"), "orbax", True, "typer"
    ),
    "eqx-ckpt report": Writer(command("report"), "report", False, "plotly"),
}


def make(path: Path) -> dict[str, str]:
    """One thing of each kind, by its name; a link to each."""
    with eqx_ckpt.CheckpointManager(path / "run.x") as manager:
        manager.save(1, TREE)
    with Recording(path / "recording.x", {"x": np.float32(0)}) as recording:
        recording.extend({"x": np.zeros(4, np.float32)})
        recording.commit(TREE)
    source = path / "source.x"
    for name in (source, path / "checkpoint.x", path / "current.x" / "here.x"):
        eqx_ckpt.tree_serialise_leaves(name, TREE)
    interop.to_safetensors(source, path / "safetensors.x")
    interop.to_npz(source, path / "npz.x")
    interop.to_eqx(source, path / "eqx.x", TREE)
    interop.to_flax(source, path / "flax.x")
    kinds = {"run.x": "run", "recording.x": "recording", "source.x": "checkpoint"}
    kinds |= {f"{kind}.x": kind for kind in ("checkpoint", "safetensors", "npz")}
    kinds |= {"eqx.x": "eqx", "flax.x": "flax"}
    if HAS_ORBAX:
        interop.to_orbax(source, path / "orbax.x")
        shutil.copytree(path / "orbax.x", path / "noted orbax.x")
        (path / "noted orbax.x" / "notes").write_text("mine")
        save_a_step(path / "orbax run.x")
        kinds |= {"orbax.x": "orbax", "noted orbax.x": "other", "orbax run.x": "other"}
    if importlib.util.find_spec("plotly"):
        eqx_ckpt.inspect.write_report(source, path / "report.x")
        os.truncate(path / "report.x", 2000)  # It has some MB, and is copied often.
        kinds["report.x"] = "report"
    if importlib.util.find_spec("h5py"):
        Samples(path / "recording.x").to_hdf5(path / "hdf5.x")
        kinds["hdf5.x"] = "hdf5"
    return kinds | make_others(path)


def save_a_step(path: Path) -> None:
    """A run of Orbax."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(path) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": np.ones(3)}))


def make_others(path: Path) -> dict[str, str]:
    (path / "text.x").write_text("5")
    (path / "page.x").write_text("<!doctype html>\n<title>mine</title>")
    np.save(path / "array.npy", np.ones(3))
    eqx.tree_serialise_leaves(path / "cut.x", TREE)
    os.truncate(path / "cut.x", 300)
    with zipfile.ZipFile(path / "zip.x", "w") as archive:
        archive.writestr("a.npy", "")
        archive.writestr("thesis.tex", "years of work")
    for name in ("folder.x", "noted.x"):
        (path / name).mkdir()
        (path / name / "thesis.tex").write_text("years of work")
    shutil.copytree(path / "checkpoint.x", path / "noted.x", dirs_exist_ok=True)
    shutil.copytree(path / "checkpoint.x", path / "linking.x")
    (path / "linking.x" / "data").symlink_to("../folder.x")
    os.mkfifo(path / "pipe.x")
    (path / "nothing.x").mkdir()
    others = ["text.x", "page.x", "array.npy", "cut.x", "zip.x", "folder.x", "noted.x"]
    kinds = dict.fromkeys([*others, "linking.x", "pipe.x"], "other")
    return kinds | {"nothing.x": "nothing"}


@pytest.fixture(scope="module")
def things(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    path = tmp_path_factory.mktemp("things")
    (path / "current.x").mkdir()
    kinds = make(path)
    for name in kinds:
        (path / f"link to {name}").symlink_to(name)
    (path / "broken.x").symlink_to("missing.x")
    return path, kinds


def below(path: Path) -> dict[str, Any]:
    """All that is below a path, with what changes when it does."""
    found: dict[str, Any] = {}
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            file = os.path.join(folder, name)
            status = os.lstat(file)
            is_folder = stat.S_ISDIR(status.st_mode)
            changed = 0 if is_folder else status.st_ctime_ns
            found[os.path.relpath(file, path)] = status.st_ino, changed
    return found


def targets(kinds: dict[str, str], writer: Writer) -> dict[str, str]:
    """Every target, relative to `current.x`: what becomes of it, if it is told to."""
    own = {"": "new", writer.kind: "replaced"}
    if writer.is_folder:
        own["nothing"] = "new"
    found = {f"../{name}": own.get(kind, "refused") for name, kind in kinds.items()}
    found |= {
        f"../link to {name}": own.get(kind, "refused") for name, kind in kinds.items()
    }
    leads = "new" if writer.kind == "checkpoint" else "refused"
    found |= {"../link to nothing.x": leads, "../broken.x": leads}
    found |= {"new.x": "new", "deep/new.x": "new", "../run.x/new.x": "new"}
    found |= {"../nothing.x/new.x": "new"}
    refused = ["", ".", "..", "../..", "../current.x", "/", "./", "a\0.x"]
    inside = ["source.x/in.x", "source.x/b/c/in.x", "link to source.x/in.x"]
    inside += ["recording.x/in.x", "recording.x/states/000001/in.x"]
    inside += ["run.x/000001/in.x"]
    if HAS_ORBAX:
        step = "orbax run.x/1"
        inside += ["orbax.x/in.x", f"{step}/in.x", f"{step}/default"]
        # Equinox adds a suffix.
        inside += [step] if writer.kind != "eqx" else []
    # Of the source, and of a recording.
    inside += ["source.x/b", "recording.x/states", "recording.x/states/000001"]
    return found | dict.fromkeys(
        [*refused, *(f"../{name}" for name in inside)], "refused"
    )


def attempt(write: Callable[..., Any], target: str, how: dict[str, Any]) -> str:
    """The error of a writer, or an empty text."""
    try:
        write("../source.x", target, **how)
    except eqx_ckpt.CheckpointError as e:
        return str(e)
    return ""


def is_named(target: str, text: str) -> bool:
    """Whether an error names a target."""
    if target in ("", "a\0.x"):
        return repr(target)[-5:] in text
    return os.path.abspath(target) in text or os.path.realpath(target) in text


@pytest.mark.once
@pytest.mark.parametrize("way", WRITERS)
def test_only_its_own_kind_is_replaced(way, things, tmp_path, monkeypatch, capsys):
    writer = WRITERS[way]
    for package in filter(None, [writer.package, writer.kind == "orbax" and "orbax"]):
        pytest.importorskip(package)
    path, kinds = things
    here = tmp_path / "here"
    shutil.copytree(path, here, symlinks=True, copy_function=copied)
    monkeypatch.chdir(here / "current.x")
    before = below(here)
    for target, outcome in targets(kinds, writer).items():
        # The others call these.
        for overwrite in (True,) if " " in way else (False, True):
            is_written = outcome == "new" or (overwrite and outcome == "replaced")
            case = f"{way}, {target!r}, overwrite={overwrite}"
            error = attempt(
                writer.write, target, {"overwrite": True} if overwrite else {}
            )
            error += capsys.readouterr().err
            after = below(here)
            if not is_written:
                assert is_named(target, error), f"{case}: {error!r}"
                assert after == before, case
                continue
            assert not error, f"{case}: {error}"
            places = changed(here, target)
            assert after != before, case
            assert outside(places, after) == outside(places, before), case
            for place in places:
                put_back(path / place, here / place)
            before = below(here)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("folder", "outcome"),
    [
        ("../folder.x", "new"),
        ("../nothing.x", "new"),
        (".", "new"),
        ("../exported.x", "replaced"),
        ("../other chains.x", "refused"),
        ("", "refused"),
        ("../text.x/in.x", "fails"),
        ("../checkpoint.x", "refused"),
        ("../source.x/b", "refused"),
        ("../recording.x", "refused"),
        ("../link to recording.x", "refused"),
        ("../recording.x/states/000001", "refused"),
    ],
)
def test_chains_are_exported(folder, outcome, overwrite, things, tmp_path, monkeypatch):
    here = tmp_path / "here"
    shutil.copytree(things[0], here, symlinks=True, copy_function=copied)
    for name, file in (("exported.x", "npz.x"), ("other chains.x", "zip.x")):
        (here / name).mkdir()
        shutil.copy(here / file, here / name / "chain_0.npz")
    monkeypatch.chdir(here / "current.x")
    found = Samples("../recording.x")
    before = below(here)
    if outcome == "new" or (outcome == "replaced" and overwrite):
        (file,) = found.to_npz(folder, overwrite=overwrite)
        name = os.path.relpath(file, here)
        after = below(here)
        assert after != before
        assert outside([name], after) == outside([name], before)
    else:
        error = OSError if outcome == "fails" else eqx_ckpt.CheckpointError
        with pytest.raises(error) as e:
            found.to_npz(folder, overwrite=overwrite)
        assert is_named(folder, str(e.value))
        assert below(here) == before


@pytest.mark.parametrize(
    "path",
    [
        *("", "../folder.x", "../text.x", "../checkpoint.x", "../checkpoint.x/in.x"),
        *("../recording.x/in.x", "../recording.x/states/000002", "../run.x/000001/b"),
    ],
)
def test_a_recording_begins_where_nothing_is(path, things, tmp_path, monkeypatch):
    here = tmp_path / "here"
    shutil.copytree(things[0], here, symlinks=True, copy_function=copied)
    monkeypatch.chdir(here / "current.x")
    before = below(here)
    with pytest.raises(eqx_ckpt.CheckpointError) as e:
        Recording(path, {"x": np.float32(0)})
    assert is_named(path, str(e.value))
    assert below(here) == before


def test_a_run_is_not_in_a_checkpoint(things, tmp_path):
    shutil.copytree(things[0] / "source.x", tmp_path / "c")
    before = below(tmp_path)
    manager = eqx_ckpt.CheckpointManager(tmp_path / "c")
    with pytest.raises(eqx_ckpt.CheckpointExistsError, match="inside of the check"):
        manager.save(2, TREE)
    assert below(tmp_path) == before


def changed(here: Path, target: str) -> list[str]:
    """What changes when a target is written: it, and what a link leads to."""
    name = os.path.relpath(os.path.abspath(target), here)
    if name == "current.x/deep/new.x":
        return ["current.x/deep"]
    if (here / name).is_symlink():
        return [name, os.readlink(here / name)]
    return [name]


def outside(places: list[str], found: dict[str, Any]) -> dict[str, Any]:
    return {
        file: identity
        for file, identity in found.items()
        if not any(f"{file}/".startswith(f"{place}/") for place in places)
    }


def put_back(old: Path, new: Path) -> None:
    """Let a place be as it was."""
    if new.is_dir() and not new.is_symlink():
        shutil.rmtree(new)
    else:
        new.unlink(missing_ok=True)
    if old.is_symlink():
        new.symlink_to(os.readlink(old))
    elif old.is_dir():
        shutil.copytree(old, new, symlinks=True)
    elif old.exists():
        shutil.copy2(old, new)


def copied(source: str, target: str) -> None:
    if os.path.isfile(source):
        shutil.copy2(source, target, follow_symlinks=False)
    else:
        os.mkfifo(target)
