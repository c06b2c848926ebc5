"""Check all models; print each counterexample; write the tables of docs/models.md."""

import sys

from .checker import check
from .page import guard_row, MODELS, scene_row, without, write


def main() -> int:
    scenes: list[str] = []
    guards: list[str] = []
    is_right = True
    for model in MODELS:
        for scene, words in model.scenes.items():
            found = check(model(scene))
            is_right = is_right and not found.problem
            scenes.append(scene_row(model, scene, found))
            print(f"{model.name}: {words}.\n{found}\n", flush=True)
        for guard, (_, words) in model.guards.items():
            found = without(model, guard)
            is_right = is_right and bool(found.problem)
            guards.append(guard_row(model, guard, found))
            print(f"{model.name}, without: {words}.\n{found}\n", flush=True)
    write("scenes", scenes)
    write("guards", guards)
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
