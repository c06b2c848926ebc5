"""A leaf of `like` beside a leaf of the checkpoint."""
