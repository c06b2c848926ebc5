"""The manager of a training run, and from which step it goes on."""
