"""Samples on their way to files: one writer, its columns, and its commits."""
