"""Other formats: sources to restore from, exports, and copies."""

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
