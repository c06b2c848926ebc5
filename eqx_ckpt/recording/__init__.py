"""Recording samples as they are drawn."""

from ._recording import Recording as Recording
from ._samples import Samples as Samples
