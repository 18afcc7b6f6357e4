"""The operator's process on Kubernetes.

It has the watches, the work queue, leader election, and `Cluster` over the API server. Imports
`engine`, `objects`, `core` and `api`; never `local` or `cli`.
"""
