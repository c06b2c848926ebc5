"""Record samples while a program draws them."""

from ._buffer import SampleBuffer as SampleBuffer
from ._collector import Collector as Collector
from ._recorder import Recorder as Recorder
from ._recording import Recording as Recording
from ._samples import Samples as Samples
from ._scan import record_scan as record_scan
