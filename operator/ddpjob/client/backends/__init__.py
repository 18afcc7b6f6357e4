"""Backends for jobs in clusters, on this machine, and in the checkpoint folders of deleted jobs."""
