"""Checkpoints in object stores and in memory."""
