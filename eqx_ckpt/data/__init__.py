"""Batches of data whose position is a value, saved with the model."""

from ._cursor import Cursor as Cursor
from ._loader import Info as Info, Loader as Loader
from ._row_sources import (
    ArraySource as ArraySource,
    RandomAccessSource as RandomAccessSource,
)
from ._stored_source import StoreSource as StoreSource
