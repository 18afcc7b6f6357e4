"""Builds a job's Kubernetes objects as plain dictionaries, and checks and merges its podTemplate.

This package does no I/O. It imports `api`, and names and types from `core`.
"""
