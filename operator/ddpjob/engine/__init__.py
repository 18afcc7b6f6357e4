"""The reconcile that both backends share, and the interface `Cluster` that each backend implements.

Kubernetes and the process backend both implement `Cluster`. Only `apply` makes changes. The package
imports `core`, `objects` and `api`.
"""
