"""Saves and restores by the processes of a job."""
