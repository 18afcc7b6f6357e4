"""A night of jobs on simulated GPU nodes under Kubernetes' own scheduler."""
