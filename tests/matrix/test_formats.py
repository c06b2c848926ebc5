"""Leaves of kinds that other formats may lack, each exported by itself."""

import warnings

import pytest

import eqx_ckpt

from .check import assert_none, differences, Route, said
from .formats import FORMATS
from .likes import NONE
from .places import to_memory
from .ways import DIRECT


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_refused_by_name_comes_back(name, every, tmp_path):
    if name == "orbax":
        pytest.importorskip("orbax.checkpoint")
    form = FORMATS[name]
    problems: dict[str, list[str]] = {}
    for leaf, saved in every.items():
        if form.seen(saved) is not NONE:
            continue  # Every way in is tried with it.
        place = to_memory({"part": {leaf: saved}})
        like = ({"part": {leaf: saved}},) if form.takes_like else ()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                path = form.write(place, tmp_path / leaf, *like)
            except eqx_ckpt.CheckpointError as e:
                problems[leaf] = [] if f"part/{leaf}'" in str(e) else [said(e)]
                continue
        route = Route(form.open(path, *like), {leaf: form.keeps(saved)}, DIRECT)
        if f"part/{leaf}" in route.source.manifest.leaves:
            problems[leaf] = differences(route, {leaf: saved})
        else:
            assert any(f"part/{leaf}'" in str(w.message) for w in warned)
    assert_none(problems)
