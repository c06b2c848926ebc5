"""Runs of many steps, and which of them are kept."""
