"""Checkpoints in directories."""
