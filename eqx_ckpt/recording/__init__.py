"""Record samples while a program draws them."""

from ._collector import Collector as Collector
from ._record_scan import record_scan as record_scan
from ._recorder import Recorder as Recorder
from ._recording import Recording as Recording
from ._sample_buffer import SampleBuffer as SampleBuffer
from ._samples import Samples as Samples
