"""Every kind of leaf in a job of several processes; each function runs in all."""

import pathlib

import eqx_ckpt

from . import leaves
from .check import differences, Route
from .likes import made, mixed
from .operations import results, through
from .ways import CALLS, DIRECT


# On devices that both processes have, or on those that each of them has by itself.
LIKES = (
    "itself",
    "same",
    "jax",
    "numpy",
    "struct",
    "struct everywhere",
    "struct in rows",
)
MORE = (*LIKES, "numpy swapped", "scalar", "struct larger", "evaluated", "int", "texts")
CALLED = ("prefix", "missing", "renamed", "filter_spec", "filter_spec of Equinox")
COMPUTED = ("stacked", "negated", "sliced")


def run(path: pathlib.Path) -> list[str]:
    saved = leaves.tree(leaves.SOME)
    eqx_ckpt.tree_serialise_leaves(path, {"part": saved}, timeout=40.0)
    direct = Route(path, saved, DIRECT)
    routes = {name: Route(path, saved, CALLS[name]) for name in CALLED}
    for name in COMPUTED:
        routes[name] = Route(path, results(name, saved)[0], through(name))
    problems = {name: differences(direct, made(name, saved)) for name in LIKES}
    routes["average"] = Route(eqx_ckpt.average([path, path]), saved, DIRECT)
    for name, route in routes.items():
        like = mixed(route.seen, name, MORE)
        problems[name] = differences(route, like, "same_kind")
    problems["unsafe"] = differences(direct, mixed(saved, "unsafe", MORE), "unsafe")
    return [f"{line} [{name}]" for name, some in problems.items() for line in some]
