"""How the processes of a job save arrays through a `filter_spec`."""

import equinox as eqx
from jax.sharding import NamedSharding, PartitionSpec as P

import eqx_ckpt

from . import programs


def save_through(directory: str) -> dict[str, tuple[str, str]]:
    """For specs that call a default, the error of a save."""
    mesh = programs.mesh()
    tree = {
        "replicated": programs.leaf("both", NamedSharding(mesh, P())),
        "sharded": programs.leaf("both", NamedSharding(mesh, P("x", "y"))),
    }
    defaults = {
        "equinox": eqx.default_serialise_filter_spec,
        "ours": eqx_ckpt.default_serialise_filter_spec,
    }
    errors = {}
    for name, default in defaults.items():
        errors[name] = ("", "")
        try:
            eqx_ckpt.tree_serialise_leaves(
                f"{directory}/{name}",
                tree,
                lambda f, x, default=default: default(f, x),
                timeout=programs.TIMEOUT,
            )
        except Exception as e:
            errors[name] = (type(e).__name__, str(e))
    return errors
