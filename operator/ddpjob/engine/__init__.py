"""The part that both backends share: observe, decide and apply, and the port `Cluster`.

Kubernetes and the process backend both implement `Cluster`. Only `apply` makes changes. The package
imports `core`, `objects` and `api`.
"""
