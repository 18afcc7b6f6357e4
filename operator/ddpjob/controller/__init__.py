"""The operator's process on Kubernetes.

It has the watches, the work queue, leader election, and `Cluster` on top of the API server. It
imports `engine`, `objects`, `core` and `api`, but never `local` or `cli`.
"""
