"""A page about a checkpoint, two of them, or a run."""
