"""The code that the `ddpjob` command and the `Client` class share to show and change jobs.

The package acts with the user's rights. On a cluster, it writes only what the user could also write
with `kubectl`, and never anything that belongs to the operator (a job's status, its pods' specs).
"""
