"""Builds a job's Kubernetes objects as plain dictionaries, and checks and merges its podTemplate.

No I/O. Imports names and views of `core.world`, and `api`.
"""
