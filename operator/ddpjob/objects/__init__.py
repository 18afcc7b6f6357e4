"""Builds a job's Kubernetes objects as plain dictionaries, and checks and merges its podTemplate.

It does no I/O. It imports `api`, and names and views from `core.world`.
"""
