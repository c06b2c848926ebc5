"""The PyTree side of a checkpoint: which leaf is which, and what to do with it."""
