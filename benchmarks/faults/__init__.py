"""What becomes of a training run's checkpoints under faults, beside other libraries."""
