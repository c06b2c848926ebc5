"""Saves, with the host memory that they need."""
