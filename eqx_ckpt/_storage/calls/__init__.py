"""Calls to the system, to TensorStore and to threads; they know no checkpoint."""
