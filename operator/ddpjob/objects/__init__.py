"""Builds the Kubernetes objects of a job as plain dictionaries, and checks and merges its podTemplate. No I/O.

Imports names and views of `core.world`, and `api`.
"""
