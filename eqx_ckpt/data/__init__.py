"""Batches of data whose position is a value, saved with the model."""

from ._cursor import Cursor as Cursor
from ._drawing import BatchInfo as BatchInfo
from ._loader import Loader as Loader
from ._row_sources import (
    ArrayDataSource as ArrayDataSource,
    RandomAccessDataSource as RandomAccessDataSource,
)
from ._stored_source import StoredDataSource as StoredDataSource
