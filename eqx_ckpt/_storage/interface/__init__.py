"""What a place can do, and what a chunk is."""
