"""Other formats: sources to restore from, exports, and copies."""

from ._convert import convert as convert
from ._eqx import eqx as eqx
from ._flax import flax as flax
from ._jax_arrays import jax_arrays as jax_arrays
from ._npz import npz as npz
from ._open import open_source as open_source
from ._optax import optax_transform as optax_transform
from ._orbax import orbax as orbax
from ._safetensors import safetensors as safetensors
from ._to_eqx import to_eqx as to_eqx
from ._to_flax import to_flax as to_flax
from ._to_npz import to_npz as to_npz
from ._to_orbax import to_orbax as to_orbax
from ._to_safetensors import to_safetensors as to_safetensors
