"""The plan of a save and the plan of a restore."""
