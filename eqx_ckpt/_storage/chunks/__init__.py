"""How the arrays of a checkpoint are kept: as files, as values, in a database."""
