"""The reconcile that both backends share, and the `Cluster` interface that each backend implements.

The two backends are Kubernetes and the process backend. Only `apply` makes changes. The package
imports `core`, `objects` and `api`.
"""
