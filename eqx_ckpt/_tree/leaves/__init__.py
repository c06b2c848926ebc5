"""The leaves of a PyTree: kinds, key paths, `filter_spec`, casts, unsaved state."""
