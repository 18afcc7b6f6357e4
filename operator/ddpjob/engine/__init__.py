"""What Kubernetes and the process backend share: observe, decide, apply, and the port `Cluster` that both implement.

`apply` is the only place that changes anything. Imports `core`, `objects` and `api`.
"""
