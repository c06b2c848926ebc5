"""A second place for the steps of a run, to which they are uploaded."""
