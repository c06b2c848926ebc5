"""Other formats: files to restore from, exports, and copies.

What opens one returns a `Source`, which stands for the path of a checkpoint in every
function that reads: `open_source` finds out what a file or a directory is; `open_eqx`,
`open_safetensors`, `open_npz`, `open_flax`, `open_orbax` and `open_jax_arrays` open one
format. A `Source` of your own answers each `RegionRead`.

`to_eqx`, `to_safetensors`, `to_npz`, `to_flax` and `to_orbax` write a checkpoint in one
format; `convert` goes from each format to each.

`to_state_dict` and `from_state_dict` do the same in memory, with nested dictionaries.
`optax_transform` restores the state of another optimiser.
"""

from .._format.source import RegionRead as RegionRead, Source as Source
from ._convert import convert as convert
from ._open_source import open_source as open_source
from ._optax_moves import optax_transform as optax_transform
from ._readers._eqx_reader import open_eqx as open_eqx
from ._readers._flax_reader import open_flax as open_flax
from ._readers._jax_arrays_reader import open_jax_arrays as open_jax_arrays
from ._readers._npz_reader import open_npz as open_npz
from ._readers._orbax_reader import open_orbax as open_orbax
from ._readers._safetensors_reader import open_safetensors as open_safetensors
from ._state_dict import (
    from_state_dict as from_state_dict,
    to_state_dict as to_state_dict,
)
from ._writers._eqx_writer import to_eqx as to_eqx
from ._writers._flax_writer import to_flax as to_flax
from ._writers._npz_writer import to_npz as to_npz
from ._writers._orbax_writer import to_orbax as to_orbax
from ._writers._safetensors_writer import to_safetensors as to_safetensors
