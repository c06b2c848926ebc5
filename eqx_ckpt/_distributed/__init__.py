"""Several processes, one checkpoint."""
