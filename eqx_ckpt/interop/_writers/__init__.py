"""Writing files for other programs, and copies."""
