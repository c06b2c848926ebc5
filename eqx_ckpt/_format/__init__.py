"""What the bytes and the names mean; no I/O, and no PyTree."""
