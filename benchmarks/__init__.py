"""Saving and restoring, side by side with other libraries. See docs/performance.md."""
