"""The steps of a training run: manager, retention, when to save, fallback."""
