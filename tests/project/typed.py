"""What pyright knows about the package from outside: it is checked, and never run."""

from pathlib import Path
from typing import Any, assert_type

import jax

import eqx_ckpt


like = {"w": jax.ShapeDtypeStruct((3,), "float32")}

manager = eqx_ckpt.CheckpointManager("run", keep=eqx_ckpt.keep_last(2))
assert_type(manager, eqx_ckpt.CheckpointManager)
assert_type(manager.latest(), int | None)
manifest = eqx_ckpt.inspect.read_manifest("ckpt")
assert_type(manifest.leaves["w"].shape, tuple[int, ...])
assert_type(eqx_ckpt.interop.to_orbax("ckpt", "orbax"), Path)
assert_type(eqx_ckpt.recording.Samples("chain").to_datatree(), Any)
eqx_ckpt.tree_serialise_leaves("ckpt", like, overwrite="no")  # pyright: ignore[reportArgumentType]
