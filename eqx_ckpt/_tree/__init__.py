"""The PyTree side of saves and restores."""
