"""Faults of the control plane, on the test cluster, which operator and jobs must survive."""
