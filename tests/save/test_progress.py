"""How far a save or a restore is, told to a function or shown as a bar."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

import eqx_ckpt


TREE = {"a": jnp.ones(1000), "b": np.ones(3), "step": 1, "c": jnp.zeros((0,))}
TOTAL = 4000 + 24


def check(reports, phases):
    assert [p for p in dict.fromkeys(phase for phase, *_ in reports)] == phases
    assert {leaf for phase, leaf, *_ in reports if phase == phases[0]} >= {"a", "b"}
    done = [done for _, _, done, _ in reports]
    assert done == sorted(done)
    assert done[-1] == TOTAL
    assert {total for *_, total in reports} == {TOTAL}


def save_async(path, tree, **kwargs):
    eqx_ckpt.tree_serialise_leaves_async(path, tree, **kwargs).result()


def save_with_manager(path, tree, progress):
    with eqx_ckpt.CheckpointManager(path, progress=progress) as manager:
        manager.save(1, tree)


@pytest.mark.parametrize(
    "save", [eqx_ckpt.tree_serialise_leaves, save_async, save_with_manager]
)
def test_a_save_reports(tmp_path, save):
    reports = []
    save(tmp_path / "new", TREE, progress=lambda *report: reports.append(report))
    check(reports, ["write", "commit"])


def test_a_restore_reports(tmp_path):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", TREE)
    reports = []
    eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "new", TREE, progress=lambda *report: reports.append(report)
    )
    check(reports, ["read", "place"])


def test_a_restore_by_a_filter_spec_reports(tmp_path):
    def spec(f, x):
        return eqx_ckpt.default_deserialise_filter_spec(f, x)

    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", TREE)
    reports = []
    eqx_ckpt.tree_deserialise_leaves(
        tmp_path / "new", TREE, spec, progress=lambda *report: reports.append(report)
    )
    assert reports[-1][2:] == (TOTAL, TOTAL)


def test_a_bar(tmp_path, capfd):
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", TREE, progress=True)
    err = capfd.readouterr().err
    assert "commit: 100%" in err
    eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", TREE, progress=True)
    err = capfd.readouterr().err
    assert "100%" in err


def test_a_bar_ends_with_its_line_when_the_restore_fails(tmp_path, capfd):
    """Also while the error, and with it all that the restore held, is kept."""
    eqx_ckpt.tree_serialise_leaves(tmp_path / "new", TREE)
    (tmp_path / "new" / "b" / "c.0").unlink()
    with pytest.raises(eqx_ckpt.CorruptCheckpointError) as kept:
        eqx_ckpt.tree_deserialise_leaves(tmp_path / "new", TREE, progress=True)
    assert kept.value.__traceback__
    err = capfd.readouterr().err
    assert "read:" in err
    assert err.endswith("\n")


def test_nothing_is_shown_unless_it_is_asked_for(tmp_path, capfd):
    with eqx_ckpt.CheckpointManager(tmp_path, keep=eqx_ckpt.keep_last(1)) as manager:
        manager.save(1, TREE)
        manager.save(2, TREE)
    manager.restore(TREE)
    assert capfd.readouterr() == ("", "")


def test_a_bar_without_tqdm(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"eqx-ckpt\[progress\]"):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "new", TREE, progress=True)
    assert not list(tmp_path.iterdir())


def test_a_progress_that_raises_stops_the_save(tmp_path):
    def refuse(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        eqx_ckpt.tree_serialise_leaves(tmp_path / "new", TREE, progress=refuse)
    with pytest.raises(ZeroDivisionError):
        save_async(tmp_path / "new", TREE, progress=refuse)
    assert not list(tmp_path.iterdir())
