"""Jobs as their users see and change them, on a cluster and on this machine alike: what `ddpjob` and `Client` share.

It acts as the user, with the user's rights: on the cluster it writes what `kubectl` would, never what
belongs to the operator (a job's status, its pods' specs).
"""
