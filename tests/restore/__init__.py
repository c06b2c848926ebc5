"""What a restore gives, and when it refuses."""
