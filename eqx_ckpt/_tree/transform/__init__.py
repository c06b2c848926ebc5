"""The `transform` argument: traced, named, cut into parts."""
