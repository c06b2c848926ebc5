"""Record the samples of chains and simulations while a program draws them.

A `Recording` writes samples, and commits them with the state of the sampler, from which
a program that was killed resumes. `record_scan` is a `jax.lax.scan` that records; a
`Recorder` records from inside of compiled programs. `Samples` reads what is committed,
and exports it.

A `Collector` gives what a `Recorder` sends to a function, and a `SampleBuffer` keeps
samples on the device.
"""

from ._collector import Collector as Collector
from ._record_scan import record_scan as record_scan
from ._recorder import Recorder as Recorder
from ._recording import Recording as Recording
from ._sample_buffer import SampleBuffer as SampleBuffer
from ._samples import Samples as Samples
