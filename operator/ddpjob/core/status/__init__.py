"""What users read of a job: conditions, phase, counts, progress, and the Kubernetes events of their changes.

Imports `failures` and what is below it; nothing of `plan`.
"""
