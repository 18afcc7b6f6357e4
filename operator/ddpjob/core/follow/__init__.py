"""Determines, in stages, what has happened to the group since the last reconcile.

`stages` runs the other modules in order. Each stage takes the result of the previous one.
"""
