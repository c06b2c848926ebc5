"""The steps of a run: what is there, when to save one, and which to keep."""
