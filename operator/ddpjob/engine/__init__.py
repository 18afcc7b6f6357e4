"""Shared by Kubernetes and the process backend: observe, decide, apply, and the port `Cluster`.

Both backends implement `Cluster`. Only `apply` makes changes. Imports `core`, `objects` and `api`.
"""
