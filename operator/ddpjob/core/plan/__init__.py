"""The plan of a job: attempts of its slots, actions on its pods, and how the job ends.

Imports `status`, `failures` and what is below them.
"""
