"""Agreement between the processes of a job."""
