"""The operator's process on Kubernetes.

It consists of the watches, the work queue, leader election, and the implementation of `Cluster` for
the API server. It imports `engine`, `objects`, `core` and `api`, but never `local` or `cli`.
"""
