"""The logs of a job's pods, and the Python stacks of their ranks."""
