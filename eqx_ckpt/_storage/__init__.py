"""All I/O: where checkpoints are kept."""
