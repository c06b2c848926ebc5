"""What a save writes, of each kind of leaf."""
