"""Batches of data, drawn in an order that a checkpoint continues to the bit.

A `Loader` draws batches from a source of rows: an `ArrayDataSource` of arrays in
memory, a `StoredDataSource` of arrays in a checkpoint, or a `RandomAccessDataSource` of
any data set with `len` and `[i]`. A `Cursor` says which batch is next: save it with the
model. A `BatchInfo` says which rows of a batch count.
"""

from ._cursor import Cursor as Cursor
from ._drawing import BatchInfo as BatchInfo
from ._loader import Loader as Loader
from ._row_sources import (
    ArrayDataSource as ArrayDataSource,
    RandomAccessDataSource as RandomAccessDataSource,
)
from ._stored_source import StoredDataSource as StoredDataSource
