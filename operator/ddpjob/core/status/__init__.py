"""What users read about a job: conditions, phase, counts, progress, and events of their changes.

Imports `failures` and what is below it; nothing of `plan`.
"""
