"""What fuzzers found once is read, or refused with an error that names the place."""

import pytest

from .corpus import CORPUS, inputs


# The packages that write the files have warnings of their own.
pytestmark = [pytest.mark.once, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    pytest.importorskip("orbax.checkpoint")
    pytest.importorskip("flax")
    from .targets import targets

    return targets(tmp_path_factory.mktemp("targets"))


def test_each_corpus_has_a_target(known):
    assert {file.stem for file in CORPUS.iterdir()} == known.keys()


@pytest.mark.parametrize("name", sorted(file.stem for file in CORPUS.iterdir()))
def test_all_that_was_found_is_read_or_refused(known, name):
    target = known[name]
    found = dict(inputs(name))
    assert found
    for entry, data in found.items():
        try:
            target.check(data)
        except Exception as e:
            raise AssertionError(f"{name}/{entry}: {data!r}") from e
    target.check(target.data)
