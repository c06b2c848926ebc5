"""Each protocol is right in every order of its steps, and needs each of its guards."""

import gc
from collections.abc import Iterator

import pytest

from .checker import check, Model, Step
from .page import guard_row, MODELS, PAGE, scene_row, without


# More than ten seconds.
LARGE = {"Commit in a bucket, overwrite", "Commit in a bucket, grace of the old"}
SCENES = [
    pytest.param(
        model,
        scene,
        id=(name := f"{model.name}, {scene}"),
        marks=[pytest.mark.slow] if name in LARGE else [],
    )
    for model in MODELS
    for scene in model.scenes
]
GUARDS = [
    pytest.param(
        model,
        guard,
        id=(name := f"{model.name}, {guard}"),
        marks=[pytest.mark.slow] if name in LARGE else [],
    )
    for model in MODELS
    for guard in model.guards
]


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    """A check keeps each state that it finds: to look for garbage takes as long."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("model", "scene"), SCENES)
def test_nothing_is_wrong(model, scene):
    found = check(model(scene))
    assert not found.problem, f"\n{found}"
    assert scene_row(model, scene, found) in PAGE.read_text(), "Run `make model`."


@pytest.mark.parametrize(("model", "guard"), GUARDS)
def test_each_guard_is_needed(model, guard):
    found = without(model, guard)
    print(found)
    assert found.problem
    assert found.trace
    assert all(found.trace)
    assert guard_row(model, guard, found) in PAGE.read_text(), "Run `make model`."


class Counter(Model):
    """It counts to a number; some numbers are wrong, some have no next one."""

    name = "Counter"
    scenes = {"stops": "", "circles": "", "ends": "", "is wrong": ""}
    guards = {}

    def start(self):
        return 0

    def steps(self, state):
        if state < 9 and not (self.scene == "stops" and state == 4):
            yield Step(f"{state + 1}", state + 1)
        if self.scene == "circles" and state == 4:
            yield Step("back to 3", 3)
        if state % 5 == 0:
            yield Step("the short way", state + 3)

    def problem(self, state):
        return "7." if self.scene == "is wrong" and state == 7 else ""

    def alone(self, state):
        return [("it", state)]

    def has_ended(self, actor, state):
        return state >= 9


def test_the_checker_finds_what_is_wrong():
    assert check(Counter("ends")).problem == ""
    assert check(Counter("ends")).states == 10
    shortest = ("the short way", "4", "5", "6", "7")
    found = check(Counter("is wrong"))
    assert (found.problem, found.trace) == ("7.", shortest)
    assert str(found).endswith("  5. 7\n  => 7.")
    stops, circles = check(Counter("stops")), check(Counter("circles"))
    assert stops.problem == circles.problem == "it never ends."
    assert stops.trace[-1] == "nothing more can happen"
    assert circles.trace[-1] == "back to 3, and so on for ever"
