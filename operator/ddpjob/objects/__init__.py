"""Builds a job's Kubernetes objects as plain dictionaries, and checks and merges its podTemplate.

It does no I/O. Imports names and views from `core.world`, and `api`.
"""
