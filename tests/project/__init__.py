"""The package as a project: its layers, documentation, examples and releases."""
