"""Faults of the control plane, on the test cluster: the operator stays, no job is hurt, and it acts again."""
