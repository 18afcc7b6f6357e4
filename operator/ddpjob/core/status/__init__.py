"""What users read about a job: conditions, phase, counts, progress, and events about changes.

The package imports `failures` and the modules below it, but nothing from `plan`.
"""
