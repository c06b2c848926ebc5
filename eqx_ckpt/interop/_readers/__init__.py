"""Opening files of other programs."""
