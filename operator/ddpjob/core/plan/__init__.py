"""The plan of a job: attempts of its slots, actions that create and remove pods, and how a job
ends.

Imports `status`, `failures` and what is below them.
"""
