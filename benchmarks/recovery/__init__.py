"""Measures how long training is interrupted when a process, pod or host dies."""
