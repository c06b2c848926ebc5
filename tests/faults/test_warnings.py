"""Warnings name the line of the program that called the package."""

import functools as ft
import pathlib
import shutil
import warnings
from collections.abc import Callable

import numpy as np
import pytest

import eqx_ckpt
from eqx_ckpt import CheckpointManager, interop, Mirror
from eqx_ckpt.recording import Recording


# Checks of types have frames of their own in between.
pytestmark = pytest.mark.once


def _damaged(run: pathlib.Path, *, shared: bool = True) -> CheckpointManager:
    """A manager whose newest step is damaged."""
    mirror = Mirror(run.parent / "mirror")
    with CheckpointManager(run, shared=shared, mirror=mirror) as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.arange(3.0)})
    shutil.rmtree(run.parent / "mirror/000002", ignore_errors=True)
    for file in (run / "000002").rglob("c.*"):
        file.write_bytes(b"damage")
    return CheckpointManager(run, shared=shared, mirror=mirror)


def _many_numbers(folder: pathlib.Path) -> None:
    eqx_ckpt.tree_serialise_leaves(folder / "a", list(range(10_001)))


def _state(folder: pathlib.Path) -> None:
    tree = {"rng": np.random.default_rng(0), "w": np.ones(3)}
    eqx_ckpt.tree_serialise_leaves_async(folder / "a", tree).result()


def _state_of_a_step(folder: pathlib.Path) -> None:
    with CheckpointManager(folder) as manager:
        manager.save(1, {"rng": np.random.default_rng(0), "w": np.ones(3)})


def _export(folder: pathlib.Path) -> None:
    eqx_ckpt.tree_serialise_leaves(folder / "a", {"a": 1.0})
    interop.to_safetensors(folder / "a", folder / "a.safetensors")


def _conversion(folder: pathlib.Path) -> None:
    eqx_ckpt.tree_serialise_leaves(folder / "a", {"a": 1.0})
    interop.convert(folder / "a", folder / "a.safetensors")


def _damage(folder: pathlib.Path, *, shared: bool) -> None:
    manager = _damaged(folder / "run", shared=shared)
    manager.restore({"w": np.zeros(3)}, on_damage="fallback")


def _another_place(folder: pathlib.Path) -> None:
    eqx_ckpt.tree_serialise_leaves(folder / "a", {"w": np.ones(3)})
    CheckpointManager(folder / "a").latest()


def _numbers(folder: pathlib.Path) -> None:
    eqx_ckpt.tree_serialise_leaves(folder / "a", {"rate": 0.1})
    eqx_ckpt.restore_or_init(folder / "a", lambda: {"rate": 0.2})


def _draws(folder: pathlib.Path) -> None:
    with Recording(folder / "a", {"x": np.float32(0)}) as recording:
        recording.append({"x": np.float32(1)})
        recording.commit({"state": 1})
        recording.append({"x": np.float32(1)})


@pytest.mark.parametrize(
    "call",
    [
        _many_numbers,
        _state,
        _state_of_a_step,
        _export,
        _conversion,
        ft.partial(_damage, shared=True),
        ft.partial(_damage, shared=False),
        _another_place,
        _numbers,
        _draws,
    ],
)
def test_the_line_of_the_caller(
    tmp_path: pathlib.Path, call: Callable[[pathlib.Path], None]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(tmp_path)
    assert caught
    assert {warning.filename for warning in caught} == {__file__}


def test_a_package_whose_name_begins_alike_is_a_caller(tmp_path: pathlib.Path) -> None:
    name = f"{pathlib.Path(eqx_ckpt.__file__).parent}_tools/training.py"
    call = compile("save(path, tree)", name, "exec")
    given = {"path": tmp_path / "a", "tree": {"rng": np.random.default_rng(0)}}
    with pytest.warns(UserWarning, match="not saved") as caught:
        exec(call, {"save": eqx_ckpt.tree_serialise_leaves, **given})
    assert {warning.filename for warning in caught} == {name}
