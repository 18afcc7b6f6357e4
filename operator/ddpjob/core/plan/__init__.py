"""Plans a job: attempts of its slots, actions on its pods, and how the job ends.

The package imports `status`, `failures` and the modules below them.
"""
