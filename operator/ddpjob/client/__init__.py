"""The user's view of jobs on a cluster or this machine, shared by `ddpjob` and `Client`.

It acts with the user's rights. On a cluster, it writes what `kubectl` could write for the user, but
never anything that belongs to the operator (a job's status, its pods' specs).
"""
