"""Plans a job: which attempt each slot has, which actions its pods need, and how the job ends.

The package imports `status`, `failures` and the modules below them.
"""
