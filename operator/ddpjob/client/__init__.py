"""The user's view of jobs on a cluster or this machine, shared by `ddpjob` and `Client`.

The package acts with the user's rights. On a cluster, it writes only what the user could also write
with `kubectl`, and never anything that belongs to the operator (a job's status, its pods' specs).
"""
