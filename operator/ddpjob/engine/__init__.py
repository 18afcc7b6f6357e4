"""Shared by Kubernetes and the process backend: observe, decide, apply, and the port `Cluster`.

Both backends implement `Cluster`. `apply` is the only place that changes anything. Imports `core`,
`objects` and `api`.
"""
