"""What a restore reads from."""
